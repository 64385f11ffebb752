"""Messages about runs to a webhook: Prefect's Custom Webhook block with the address, and automations that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.settings import PREFECT_UI_URL
from prefect.types import SecretDict

from engine.errors import BadInput
from tasks.cluster.flow_run import CHAMPION, FINISHED, FOLDER

BLOCK = "metronome-alerts"
"""Name of the block on the server."""
OFF = "off"
"""The value of --notify that removes the alerts."""
WAIT_MINUTES = 30
"""Minutes that a run may wait for a worker before a message says so."""

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
_PLAIN = "|replace('<', '‹')"
_SAFE = {
    "slack": "|replace('&', '&amp;')|replace('<', '&lt;')|replace('>', '&gt;')",
    **dict.fromkeys(("feishu", "dingtalk", "wecom"), _PLAIN),
}
"""Filters by format. The text of an error may be a model's, and <!channel> or <at user_id="all"> calls everybody."""
_OURS = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.metronome"}
_EACH_ONCE: dict[str, Any] = {"for_each": {"prefect.resource.id"}, "threshold": 1}
_BEGUN = {"prefect.flow-run.Running"}
_OVER = {f"prefect.flow-run.{state}" for state in ("Cancelling", "Cancelled", "Completed", "Failed")}
_WAITS = {f"prefect.flow-run.{state}" for state in ("Late", "AwaitingRetry", "Pending")}
"""States of a run without a worker, and of one whose pod has no node or no image."""


def choose_format(url: str, given: str = "") -> str:
    """The format of messages to an address: `given`, else the format of its host. Raises BadInput."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("--notify: expected the address of a webhook, https://HOST/PATH, or off")
    if given and given not in FORMATS:
        raise BadInput(f"--notify-format {given}: expected one of {', '.join(FORMATS)}")
    return given or HOSTS.get(parts.hostname, "json")


def webhook_block(url: str, kind: str) -> CustomWebhookNotificationBlock:
    """The block that sends messages in the format `kind`. The address is one of its secrets."""
    return CustomWebhookNotificationBlock(
        name="metronome", url="{{address}}", json_data=FORMATS[kind], secrets=SecretDict({"address": url})
    )


def install_alerts(url: str, kind: str, wait_minutes: float) -> list[str]:
    """Create or update block and automations on the server that PREFECT_API_URL names; returns the names. `url` may be
    `OFF`, which removes both."""
    if url == OFF:
        remove_automations(one.name for one in build_alerts(UUID(int=0), ""))
        with suppress(ValueError):  # there is none
            CustomWebhookNotificationBlock.delete(BLOCK)
        return []
    block = webhook_block(url, kind).save(BLOCK, overwrite=True)
    made = build_alerts(block, str(PREFECT_UI_URL.value() or ""), wait_minutes, kind)
    with get_client(sync_client=True) as client:
        for automation in made:
            if there := client.read_automations_by_name(automation.name):
                automation.id = there[0].id
                automation.update()
            else:
                automation.create()
    return [one.name for one in made]


def remove_automations(names: Iterable[str]) -> None:
    """Delete the automations that have these names, where there are any."""
    with get_client(sync_client=True) as client:
        for name in names:
            for found in client.read_automations_by_name(name):
                client.delete_automation(found.id)


def build_alerts(block: UUID, ui: str, wait_minutes: float = WAIT_MINUTES, kind: str = "json") -> list[Automation]:
    """The automations. `block`: id of the block that sends; `ui`: address of the Prefect UI, "" if unknown; a run waits
    for a worker for `wait_minutes` without a message. `kind`: format of the messages."""
    safe = _SAFE.get(kind, "")
    short = f"|string|truncate({LONGEST}, true){safe}" if safe else ""
    run = f"{{{{ flow_run.name{safe} }}}}"
    own_run = f"{{{{ event.payload.run{safe} }}}}"
    champion = f"{{{{ event.payload.policy{safe} }}}}"
    flow = _body(f"flow_run.state.message{short}", "flow_run.id", f"flow_run.labels['{FOLDER}']{safe}", ui)
    own = _body(f"event.payload.figures{short}", "event.payload.flow_run", f"event.payload.folder{safe}", ui)
    resumed = {*_BEGUN, *_OVER, *_WAITS, "prefect.flow-run.Scheduled"}
    not_resumed = _missing({"prefect.flow-run.Crashed"}, resumed, 600.0)  # the watchdog takes one minute
    waiting = f"{run} has waited for a worker or a pod for {wait_minutes:g} minutes"
    not_begun = _missing(_WAITS, _BEGUN | _OVER, 60.0 * wait_minutes)
    alerts = (
        ("a run has failed", f"{run} has failed", flow, _happens("prefect.flow-run.Failed", _OURS)),
        ("a crashed run is not resumed", f"{run} crashed and is not resumed", flow, not_resumed),
        ("a run waits for a worker", waiting, flow, not_begun),
        ("a run has finished", f"{own_run} has finished", own, _happens(FINISHED, {})),
        ("a new champion", f"{champion} is the new champion", own, _happens(CHAMPION, {})),
    )
    return [
        Automation(
            name=f"metronome alert: {name}",
            description="Sends a message (metronome deploy --notify).",
            trigger=trigger,
            actions=[SendNotification(block_document_id=block, subject=f"Metronome: {subject}", body=body)],
        )
        for name, subject, body, trigger in alerts
    ]


def _body(what: str, number: str, folder: str, ui: str) -> str:
    """The reason, the link to the flow run, and a command. `folder`: the expression of the run's folder, which is empty
    before the run has one."""
    link = f"{ui}/runs/flow-run/{{{{ {number} }}}}" if ui else ""
    given = folder.partition("|")[0]
    logs = f'{{% if {given} %}}metronome logs "{{{{ {folder} }}}}"{{% else %}}metronome runs{{% endif %}}'
    return "\n".join(filter(None, (f"{{{{ {what} }}}}", link, logs)))


def _happens(event: str, related: dict[str, str]) -> EventTrigger:
    """Fires at each event."""
    return EventTrigger(expect={event}, match_related=related, posture=Posture.Reactive, **_EACH_ONCE)


def _missing(after: set[str], expect: set[str], within_s: float) -> EventTrigger:
    """Fires if none of the events `expect` follows one of `after` in time."""
    return EventTrigger(
        after=after,
        expect=expect,
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=_OURS,
        posture=Posture.Proactive,
        within=timedelta(seconds=within_s),
        **_EACH_ONCE,
    )
