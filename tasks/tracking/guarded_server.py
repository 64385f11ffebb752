"""MLflow's server of `make services`, behind checks of who asks: the app "metronome" of `mlflow server --app-name`.

MLflow itself takes requests from the pages of every server of this machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engine.wire.access_token import refuse_source

NEEDLESS = ("origin", "sec-fetch-site", "content-encoding")
"""Headers that are not checked in a request of MLflow's own page."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Any, Send], Awaitable[None]]


def guard(application: Application) -> Application:
    """Return the ASGI application behind a check: of web pages it takes the requests of its own only. A link to it may
    stand on any page."""

    async def answer(scope: Scope, receive: Any, send: Send) -> None:  # noqa: ANN401
        refused = None
        if scope["type"] != "lifespan":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refused = refuse_source({name: value for name, value in headers.items() if name not in _needless(headers)})
        if refused is None:
            await application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send(
                {"type": "http.response.start", "status": refused[0], "headers": [(b"content-type", b"text/plain")]}
            )
            await send({"type": "http.response.body", "body": refused[1].encode()})

    return answer


def _needless(headers: dict[str, str]) -> tuple[str, ...]:
    origin = headers.get("origin")
    own = f"http://{headers.get('host', '')}"
    same = origin in (None, own) and headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    link = (
        origin is None and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    return NEEDLESS if same or link else ("content-encoding",)


def create_app() -> Application:
    """Make MLflow's own server, guarded. `mlflow server` has set its environment by then."""
    from mlflow.server.fastapi_app import app

    return guard(app)
