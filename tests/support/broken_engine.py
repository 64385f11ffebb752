"""`metronome conform`, and a server between it and a real rollout instance that breaks one rule of the protocol."""

import asyncio
import contextlib
import json
import random
import threading

import aiohttp
from aiohttp import web

from engine.tools.conformance.suite import conform

COMPLETIONS = "/v1/completions"
LARGE = 2**17
"""Bytes: more than what the tests' requests have, but for those that try the limits."""


def tried(url, *, only=(), **given):
    """(whether it conforms, {rule: its line}, the last line)."""
    said = []
    arguments = {"model": "", "dtype": "float32", "shared": None, "timeout_s": 20.0, "only": only} | given
    holds = conform(url=url, say=said.append, **arguments)
    print("\n".join(said))
    return holds, {line.split()[0]: line for line in said[:-1]}, said[-1]


class BrokenEngine:
    """Passes requests on. A fault may answer a request itself, change it, or change its reply."""

    def __init__(self, target, token, fault):
        self.target = target
        self.token = token
        self.fault = fault
        self.version = 0
        self.slow = 8  # that many times

    async def handle(self, request):
        body = await request.read()
        known = request.path == "/health" or request.headers.get("Authorization") == f"Bearer {self.token}"
        allowed = known and len(body) <= LARGE
        if not allowed and self.fault not in (ignores_the_token, takes_any_body):
            return await self.forward(request, body)  # who asks for too much is refused by the real instance
        answer = await self.fault(self, request, body)
        return await self.forward(request, body) if answer is None else answer

    async def forward(self, request, body, path=None, headers=None):
        """The target's reply."""
        kept = {key: value for key, value in request.headers.items() if key == "Authorization"}
        try:
            async with self.session.request(
                request.method,
                self.target + (path or request.path_qs),
                data=body,
                headers=kept if headers is None else headers,
            ) as reply:
                return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)
        except aiohttp.ClientOSError:  # it has refused the body before it had all of it
            return web.json_response({"error": {"message": "large", "type": "x", "code": 413}}, status=413)

    @contextlib.contextmanager
    def serving(self):
        """Its URL."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), loop).result(30)
        try:
            yield f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)

    async def _start(self):
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()

    async def _stop(self):
        await self.runner.cleanup()
        await self.session.close()


def reply_with(change):
    """A fault that changes the replies of completions."""

    async def fault(engine, request, body):
        if request.path != COMPLETIONS or request.method != "POST":
            return None
        answer = await engine.forward(request, body)
        if answer.status != 200:
            return answer
        reply = json.loads(answer.body)
        change(reply, reply["choices"][0])
        return web.json_response(reply)

    return fault


def request_with(path, change):
    """A fault that changes the bodies of requests to a route."""

    async def fault(engine, request, body):
        if request.path != path or request.method != "POST":
            return None
        try:
            content = json.loads(body)
            change(content)
        except (ValueError, TypeError, KeyError, AttributeError):  # a malformed one stays as it is
            return None
        return await engine.forward(request, json.dumps(content).encode())

    return fault


def answered(path, content, status=200, where=lambda request, body: True):
    """A fault that answers a route by itself."""

    async def fault(engine, request, body):
        return web.json_response(content, status=status) if request.path == path and where(request, body) else None

    return fault


async def ignores_the_token(engine, request, body):
    return await engine.forward(request, body, headers={"Authorization": f"Bearer {engine.token}"})


async def takes_any_body(engine, request, body):
    return web.json_response({}) if len(body) > 2**16 and request.path != "/health" else None


async def is_slow_to_say_its_load(engine, request, body):
    if request.path == "/load" and engine.slow:
        engine.slow -= 1
        await asyncio.sleep(1.5)


async def keeps_what_its_client_left(engine, request, body):
    if request.path == COMPLETIONS:
        return await asyncio.shield(asyncio.ensure_future(engine.forward(request, body)))
    return None


async def lets_responses_finish_instead_of_aborting(engine, request, body):
    if request.path == "/pause" and request.query.get("mode") != "wait":
        return (
            await engine.forward(request, body, path="/pause?mode=wait")
            if request.query.get("mode") == "abort"
            else None
        )
    return None


async def aborts_instead_of_letting_responses_finish(engine, request, body):
    if request.path == "/pause" and request.query.get("mode") == "wait":
        return await engine.forward(request, body, path="/pause?mode=abort")
    return None


async def ignores_updates(engine, request, body):
    """It names each version, but keeps its weights."""
    if request.path == "/load":
        load = json.loads((await engine.forward(request, body)).body)
        return web.json_response(load | {"weight_version": engine.version})
    if request.path == "/finish_weight_update":
        engine.version = json.loads(body)["weight_version"]
        return web.json_response({"weight_version": engine.version})
    ignored = ("/begin_weight_update", "/update_weights")
    return web.json_response({}) if request.path in ignored and "keep" not in request.query_string else None


def no_versions(reply, choice):
    del reply["weight_versions"]


def stale_version(reply, choice):
    reply["weight_versions"] = [[0, 3]]


def one_version_too_few(reply, choice):
    reply["weight_versions"] = [[1, version] for _, version in reply["weight_versions"]]


def wrong_logprobs(reply, choice):
    choice["logprobs"]["token_logprobs"] = [value - 0.05 for value in choice["logprobs"]["token_logprobs"]]


async def logprobs_after_top_p(engine, request, body):
    """The most likely tokens are all that there is, so that theirs are higher."""
    answer = await engine.forward(request, body)
    if request.path == COMPLETIONS and answer.status == 200 and 0 < json.loads(body).get("top_p", 1) < 1:
        reply = json.loads(answer.body)
        reply["choices"][0]["logprobs"]["token_logprobs"] = [
            value / 2 for value in reply["choices"][0]["logprobs"]["token_logprobs"]
        ]
        return web.json_response(reply)
    return answer


def one_logprob_too_few(reply, choice):
    choice["logprobs"]["token_logprobs"].pop()


def wrong_prompt_logprobs(reply, choice):
    for entry in filter(None, choice.get("prompt_logprobs") or []):
        for value in entry.values():
            value["logprob"] *= 1.01


def foreign_tokens(reply, choice):
    choice["token_ids"] = [token + 10**6 for token in choice["token_ids"]]


def other_reason(reply, choice):
    choice["finish_reason"] = {"stop": "length"}.get(choice["finish_reason"], choice["finish_reason"])


def no_stop(content):
    del content["stop_token_ids"]


def random_seed(content):
    if "seed" in content and -(2**63) <= content["seed"] < 2**63:
        content["seed"] = random.getrandbits(60)


def one_seed(content):
    if "seed" in content and -(2**63) <= content["seed"] < 2**63:
        content["seed"] = 0


def one_stream(content):
    content.setdefault("seed", 0)


def no_checksums(content):
    info = content["update_info"]
    if info.get("transport") == "file" and not info.get("staged"):
        content["update_info"] = {"path": info["path"]}


def no_perturbation(content):
    if content["update_info"].get("transport") == "base":
        content["update_info"]["perturb"] = []
