"""The HTTP routes of a rollout instance; the same as vLLM's OpenAI server with its weight routes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from engine.errors import BadInput, DeadlineError, TransferError
from engine.instance import protocol
from engine.instance.embedded import replies
from engine.instance.embedded.engine import Conflict, Engine
from engine.instance.embedded.engine_thread import EngineThread
from engine.instance.embedded.instance_metrics import CONTENT_TYPE, exposition
from engine.instance.embedded.security import Guard, Handler
from engine.instance.embedded.updates import Updates


class Routes:
    """Handlers over one worker. Whatever a handler refuses has had no effect."""

    def __init__(self, worker: EngineThread, limits: protocol.RequestLimits, model: str, guard: Guard) -> None:
        self._worker = worker
        self._limits = limits
        self._model = model
        self._guard = guard
        self._updates = Updates(worker, Path(model))
        self._numbers = itertools.count()

    def application(self) -> web.Application:
        """The routes as an aiohttp application."""
        app = web.Application(middlewares=[_errors_as_json, *self._guard.middlewares()])
        app.on_shutdown.append(self._close)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.get("/health", self.health),
                web.get("/weight_version", self.weight_version),
                web.get("/get_world_size", self.world_size),
                web.get("/load", self.load),
                web.get("/metrics", self.metrics),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/init_weight_transfer_engine", self.init_weight_transfer_engine),
                web.post("/start_weight_update", self.start_weight_update),
                web.post("/update_weights", self.update_weights),
                web.post("/finish_weight_update", self.finish_weight_update),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )
        return app

    async def _close(self, app: web.Application) -> None:
        """A broadcast under way would keep the process alive until its deadline."""
        self._updates.close()

    async def completions(self, request: web.Request) -> web.Response:
        """One response to one prompt."""
        asked = protocol.parse_completion(protocol.parse_object(await request.read()), self._limits)
        result = await self._worker.complete(asked.prompt, replies.sampling_of(asked), asked.prompt_logprobs)
        if result.finish_reason == "error" or any(value != value for value in result.prompt_logprobs or ()):
            return _error(500, "InternalServerError", f"the logits of weight version {result.version} are not finite")
        return _json(replies.completion_reply(next(self._numbers), self._model, asked.prompt, result))

    async def health(self, request: web.Request) -> web.Response:
        """Answers once the model is loaded."""
        return _json({})

    async def weight_version(self, request: web.Request) -> web.Response:
        """The version of the last finished update; 0 for the weights from disk."""
        return _json({"weight_version": await self._worker.call(lambda engine: engine.version)})

    async def world_size(self, request: web.Request) -> web.Response:
        """Processes that take part in a weight transfer."""
        return _json({"world_size": 1})

    async def load(self, request: web.Request) -> web.Response:
        """Engine.load."""
        return _json(await self._worker.call(Engine.load))

    async def metrics(self, request: web.Request) -> web.Response:
        """Engine.figures for Prometheus."""
        text = exposition(await self._worker.call(Engine.figures))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def pause(self, request: web.Request) -> web.Response:
        """Stop admitting; answers when nothing runs any more."""
        await _nothing(request)
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait"):
            raise BadInput(f"mode = {mode!r}; it must be abort or wait")
        await self._worker.pause(abort=mode == "abort")
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """Admit again."""
        await _nothing(request)
        await self._worker.call(Engine.resume)
        return _json({"status": "resumed"})

    async def init_weight_transfer_engine(self, request: web.Request) -> web.Response:
        """Receiver.connect; nothing to do without an init_info (files need none)."""
        info = protocol.parse_info(protocol.parse_object(await request.read()), "init_info")
        if info:
            await self._updates.connect(info)
        return _json({"message": "ready for weights"})

    async def start_weight_update(self, request: web.Request) -> web.Response:
        """Engine.start_update."""
        protocol.parse_object(await request.read())
        await self._updates.start()
        return _json({"message": "weight update started"})

    async def update_weights(self, request: web.Request) -> web.Response:
        """A bucket: received, verified and loaded, or staged."""
        await self._updates.update(protocol.parse_info(protocol.parse_object(await request.read()), "update_info"))
        return _json({"message": "weights loaded"})

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        """Engine.finish_update."""
        version = protocol.parse_version(protocol.parse_object(await request.read()))
        await self._updates.finish(version)
        return _json({"weight_version": version})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Forget computed prompts."""
        await _nothing(request)
        await self._worker.call(lambda engine: engine.prompts.clear())
        return _json({"message": "prefix cache reset"})


async def _nothing(request: web.Request) -> None:
    """BadInput unless the body is empty or a JSON object, which some clients must send."""
    protocol.parse_object(await request.read() or b"{}")


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadInput as error:
        return _error(400, "BadRequestError", str(error))
    except (TransferError, DeadlineError) as error:
        return _error(503, type(error).__name__, str(error))
    except Conflict as error:
        return _error(409, "ConflictError", str(error))
    except web.HTTPException as error:  # no such route or method, no token, body too large
        return _error(error.status, error.reason.replace(" ", "") + "Error", error.text or error.reason, error.headers)


def _error(status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    answer = _json({"error": {"message": message, "type": kind, "code": status}}, status)
    answer.headers.update(
        {key: value for key, value in (headers or {}).items() if key in ("Allow", "WWW-Authenticate")}
    )
    return answer


def _json(value: Any, status: int = 200) -> web.Response:  # noqa: ANN401
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")
