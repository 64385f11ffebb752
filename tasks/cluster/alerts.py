"""Messages about runs to a webhook: a block of the Prefect server with the address, and automations that use it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_UI_URL
from prefect.types import SecretDict

from engine.errors import BadInput
from tasks.cluster import events, watchdog
from tasks.cluster.flow_names import FOLDER
from tasks.cluster.signed_webhook import DINGTALK, FEISHU, KEY, SignedWebhook

BLOCK = "metronome-alerts"
"""Name of the block on the server."""
SIGNED_BLOCK = "metronome-signed-alerts"
"""Its name if messages are signed."""
_BLOCKS = ((BLOCK, CustomWebhookNotificationBlock), (SIGNED_BLOCK, SignedWebhook))
SECRET = "METRONOME_NOTIFY_SECRET"
"""Environment variable of a deploy: the secret with which a robot wants its messages signed."""
SIGNED = (FEISHU, DINGTALK)
"""The formats whose receivers know signatures."""
OFF = "off"
"""The value of --notify that removes the alerts."""
WAIT_MINUTES = 30
"""Minutes that a run may wait for a worker before a message says so."""
CRASHED_S = 600.0
"""Seconds within which a crashed run must be resumed; the watchdog takes two minutes at most."""

_TEXT = "{{subject}}\n{{body}}"
FORMATS: Mapping[str, dict[str, Any]] = {
    "slack": {"text": _TEXT},
    "feishu": {"msg_type": "text", "content": {"text": _TEXT}},
    "dingtalk": {"msgtype": "text", "text": {"content": _TEXT}},
    "wecom": {"msgtype": "text", "text": {"content": _TEXT}},
    "json": {"subject": "{{subject}}", "body": "{{body}}"},
}
"""The JSON body of a request by the receiver's format; Prefect fills in subject and body."""
HOSTS = {
    "hooks.slack.com": "slack",
    "open.feishu.cn": "feishu",
    "open.larksuite.com": "feishu",
    "oapi.dingtalk.com": "dingtalk",
    "qyapi.weixin.qq.com": "wecom",
}
"""The formats of known hosts; any other host gets plain JSON."""
LONGEST = 500
"""Characters of a reason in a message to people: WeCom takes 2,048 bytes."""
_SHORT = f"|string|truncate({LONGEST}, true)"
_PLAIN = "|replace('<', '‹')"
_SAFE: Mapping[str, str] = {
    "slack": "|replace('&', '&amp;')|replace('<', '&lt;')|replace('>', '&gt;')",
    "feishu": _PLAIN,
    "dingtalk": _PLAIN,
    "wecom": _PLAIN,
}
"""Filters by format. The text of an error may be a model's, and <!channel> or <at user_id="all"> calls everybody."""

_OURS = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.metronome"}
_WAITS = {"prefect.flow-run.Late", "prefect.flow-run.AwaitingRetry"}


def choose_format(url: str, given: str = "", secret: str = "") -> str:
    """The format of messages to an address: `given`, else the format of its host. Raises BadInput, also for a `secret`
    to sign with that the receiver does not know."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("--notify: expected the address of a webhook, https://HOST/PATH, or off")
    if given and given not in FORMATS:
        raise BadInput(f"--notify-format {given}: expected one of {', '.join(FORMATS)}")
    kind = given or HOSTS.get(parts.hostname, "json")
    if secret and kind not in SIGNED:
        raise BadInput(f"{SECRET} is set, but only messages to {' and '.join(SIGNED)} are signed, not {kind}: unset it")
    return kind


def webhook_block(url: str, kind: str, secret: str = "") -> CustomWebhookNotificationBlock:
    """The block that sends messages in the format `kind`, signed with the robot's `secret` if there is one. The address
    is one of its secrets."""
    if secret:
        return SignedWebhook(
            name="metronome",
            robot=kind,
            url="{{address}}",
            json_data=FORMATS[kind],
            secrets=SecretDict({"address": url, KEY: secret}),
        )
    return CustomWebhookNotificationBlock(
        name="metronome", url="{{address}}", json_data=FORMATS[kind], secrets=SecretDict({"address": url})
    )


def install_alerts(url: str, kind: str, wait_minutes: float, secret: str = "") -> list[str]:
    """Create or update block and automations on the server that PREFECT_API_URL names; returns the names. `url` may be
    `OFF`, which removes both. `secret`: see `webhook_block`. No other block of an earlier deploy keeps its secrets."""
    if url == OFF:
        for name in names():
            try:
                Automation.read(name=name).delete()
            except (ValueError, ObjectNotFound):
                continue
        _delete_blocks()
        return []
    name = SIGNED_BLOCK if secret else BLOCK
    block = webhook_block(url, kind, secret).save(name, overwrite=True)
    installed = watchdog.install(build_alerts(block, str(PREFECT_UI_URL.value() or ""), wait_minutes, kind))
    _delete_blocks(keep=name)
    return installed


def names() -> list[str]:
    """The names of all alerts."""
    return [one.name for one in build_alerts(UUID(int=0), "")]


def blocks() -> list[tuple[str, str]]:
    """(slug of the type, name) of the blocks that alerts may use."""
    return [(block.get_block_type_slug(), name) for name, block in _BLOCKS]


def _delete_blocks(keep: str = "") -> None:
    for name, block in _BLOCKS:
        if name != keep:
            with suppress(ValueError):  # there is none
                block.delete(name)


def build_alerts(block: UUID, ui: str, wait_minutes: float = WAIT_MINUTES, kind: str = "json") -> list[Automation]:
    """The automations. `block`: id of the block that sends; `ui`: address of the Prefect UI, "" if unknown; a run waits
    for a worker for `wait_minutes` without a message. `kind`: format of the messages."""
    safe = _SAFE.get(kind, "")
    short = _SHORT + safe if safe else ""
    run = f"{{{{ flow_run.name{safe} }}}}"
    flow = _body(
        f"{{{{ flow_run.state.message{short} }}}}",
        f"{ui}/runs/flow-run/{{{{ flow_run.id }}}}" if ui else "",
        f"flow_run.labels['{FOLDER}']{safe}",
    )
    own_run = f"{{{{ event.payload.run{safe} }}}}"
    link = f"{ui}/runs/flow-run/{{{{ event.payload.flow_run }}}}" if ui else ""
    own = _body(f"{{{{ event.payload.figures{short} }}}}", link, f"event.payload.folder{safe}")
    flow_alerts = {
        ("a run has failed", f"{run} has failed"): _follows("prefect.flow-run.Failed", "prefect.flow-run.*", _OURS),
        ("a crashed run is not resumed", f"{run} crashed and is not resumed"): _missing(
            {"prefect.flow-run.Crashed"}, watchdog.LEFT, CRASHED_S
        ),
        ("a run waits for a worker", f"{run} has waited for a worker for {wait_minutes:g} minutes"): _missing(
            _WAITS, watchdog.LEFT - _WAITS - {"prefect.flow-run.Scheduled"}, 60.0 * wait_minutes
        ),
    }
    own_alerts = {
        ("a run has finished", f"{own_run} has finished"): _follows(events.FINISHED, "metronome.run.*"),
        ("a new champion", f"{{{{ event.payload.policy{safe} }}}} is the new champion"): _follows(
            events.CHAMPION, "metronome.run.*"
        ),
    }
    return [
        Automation(
            name=f"metronome alert: {name}",
            description="Sends a message (metronome deploy --notify).",
            trigger=trigger,
            actions=[SendNotification(block_document_id=block, subject=f"Metronome: {subject}", body=body)],
        )
        for alerts, body in ((flow_alerts, flow), (own_alerts, own))
        for (name, subject), trigger in alerts.items()
    ]


def _body(what: str, link: str, folder: str) -> str:
    """`folder`: the expression of the run's folder, which is empty before the run has one."""
    given = folder.partition("|")[0]
    logs = f'{{% if {given} %}}metronome logs "{{{{ {folder} }}}}"{{% else %}}metronome runs{{% endif %}}'
    return "\n".join(filter(None, (what, link, logs)))


def _follows(event: str, resource: str, related: Mapping[str, str] = MappingProxyType({})) -> EventTrigger:
    """Fires at each event."""
    return EventTrigger(
        expect={event},
        match={"prefect.resource.id": resource},
        match_related=dict(related),
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
    )


def _missing(after: set[str], expect: set[str], within_s: float) -> EventTrigger:
    """Fires if none of the events `expect` follows one of `after` in time."""
    return EventTrigger(
        after=after,
        expect=expect,
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=_OURS,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within_s),
    )
