"""Sends replies over ASGI and handles clients that disconnect early. Used by both engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar

from engine.instance.refusals import Refusal
from engine.types import JsonObject

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")


class ClientLeft(Exception):
    """The client has closed its connection, so there is nowhere to send the reply."""


async def unless_client_leaves(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientLeft."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.ensure_future(_wait_until_client_leaves(receive))
    watch.add_done_callback(lambda ended: None if ended.cancelled() else task.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.done():
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        watch.cancel()


async def _wait_until_client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, content: JsonObject) -> None:
    """Send a reply with status 200."""
    await send_body(send, 200, json.dumps(content).encode())


async def send_error(send: Send, error: Refusal) -> None:
    """Send a refusal, in the form of OpenAI's errors."""
    body = {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
    await send_body(send=send, status=error.status, body=json.dumps(body).encode(), more=error.headers)


async def send_body(
    send: Send, status: int, body: bytes, content_type: str = "application/json", more: Mapping[str, str] | None = None
) -> None:
    """Send a complete reply."""
    headers = {"Content-Type": content_type, "Content-Length": str(len(body)), **(more or {})}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
