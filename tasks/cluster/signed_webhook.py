"""A block of Prefect that signs messages to a robot of Feishu (Lark) or DingTalk, as their documentation says.

The Prefect server sends the messages, so it needs this class: it finds it by the entry point `prefect.collections` if
Metronome is installed in its environment.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from typing import Any

import httpx
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from pydantic import Field

FEISHU = "feishu"
DINGTALK = "dingtalk"
KEY = "key"
"""Name of the robot's secret among the block's secrets."""


def feishu_signature(secret: str, at_s: int) -> dict[str, str]:
    """What a signed message has in its body: the key is time and secret, and nothing is hashed (Feishu, custom bot
    guide, "signature verification"). `at_s`: seconds since 1970."""
    key = f"{at_s}\n{secret}".encode()
    return {"timestamp": str(at_s), "sign": _encode(hmac.new(key, b"", hashlib.sha256))}


def dingtalk_signature(secret: str, at_ms: int) -> dict[str, str]:
    """What a signed message has in its address: the key is the secret, and time and secret are hashed (DingTalk, custom
    robot security settings). `at_ms`: milliseconds since 1970."""
    text = f"{at_ms}\n{secret}".encode()
    return {"timestamp": str(at_ms), "sign": _encode(hmac.new(secret.encode(), text, hashlib.sha256))}


def _encode(found: hmac.HMAC) -> str:
    return base64.b64encode(found.digest()).decode()


class SignedWebhook(CustomWebhookNotificationBlock):
    """Sends messages to a signed robot."""

    _block_type_name = "Metronome signed webhook"
    _block_type_slug = "metronome-signed-webhook"

    robot: str = Field(description="feishu or dingtalk")

    def _build_request_args(self, body: str, subject: str | None) -> dict[str, Any]:
        request = super()._build_request_args(body, subject)
        secret = self.secrets.get_secret_value()[KEY]
        if self.robot == FEISHU:
            request["json"] = {**feishu_signature(secret, int(time.time())), **request["json"]}
        else:
            request["url"] = str(
                httpx.URL(request["url"]).copy_merge_params(dingtalk_signature(secret, int(time.time() * 1000)))
            )
        return request
