"""Messages about runs to a webhook: Prefect's Custom Webhook block with the address, and automations that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from string import Template
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import yaml
from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_UI_URL
from prefect.types import SecretDict

from engine.config.recipe import HOME
from engine.errors import BadInput

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
FILE = HOME / "infra/automations.yaml"
"""The automations."""


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
        _remove_automations(one.name for one in build_alerts(UUID(int=0), ""))
        with suppress(ValueError):  # there is none
            CustomWebhookNotificationBlock.delete(BLOCK)
        return []
    block = webhook_block(url, kind).save(BLOCK, overwrite=True)
    made = build_alerts(block, str(PREFECT_UI_URL.value()), wait_minutes)
    with get_client(sync_client=True) as client:
        for automation in made:
            if there := client.read_automations_by_name(automation.name):
                automation.id = there[0].id
                automation.update()
            else:
                automation.create()
    return [one.name for one in made]


def _remove_automations(names: Iterable[str]) -> None:
    """Delete the automations that have these names, where there are any."""
    with get_client(sync_client=True) as client:
        for name in names:
            for found in client.read_automations_by_name(name):
                client.delete_automation(found.id)


def build_alerts(block: UUID, ui: str, wait_minutes: float = WAIT_MINUTES) -> list[Automation]:
    """The automations. `block`: id of the block that sends; `ui`: address of the Prefect UI; a run waits for a worker
    for `wait_minutes` without a message."""
    given = {"block": block, "ui": ui, "minutes": f"{wait_minutes:g}", "seconds": 60.0 * wait_minutes}
    found = yaml.safe_load(Template(FILE.read_text()).substitute(given))
    return [Automation.model_validate(one) for one in found["automations"]]
