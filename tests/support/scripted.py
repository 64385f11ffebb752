"""A rollout instance on a real socket whose answers the test scripts; responses depend on prompt and seed only."""

import asyncio
import contextlib
import random
from types import SimpleNamespace

from aiohttp import web

from engine.errors import MetronomeError
from engine.types import Score
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL, FinishUpdate
from support.replies import reply

SERVES = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "53"); self.end_headers()
        self.wfile.write(b'{"protocol": 3, "world_size": 1, "weight_version": 0}')
    do_POST = do_GET
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open(sys.argv[1] + ".partial", "w").write(json.dumps({"host": "127.0.0.1", "port": server.server_port}))
os.rename(sys.argv[1] + ".partial", sys.argv[1])
server.serve_forever()
"""
"""A process that serves as an instance's would, and answers that it speaks our protocol to everything."""


def tokens_of(prompt, seed):
    """What every scripted instance samples."""
    draw = random.Random(f"{prompt}-{seed}")
    return [draw.randrange(2, 50) for _ in range(draw.randrange(1, 6))]


class Scripted:
    """Behaviour is set by attributes: `status` (for completions), `delay_s`, `silent` (answers nothing), `drop`,
    `body`."""

    def __init__(self, version=0):
        self.version = version
        self.status = 200
        self.delay_s = 0.0
        self.takes = None  # makes the seconds of a completion from its body, in place of `delay_s`
        self.silent = False
        self.drop = False
        self.body = None
        self.finish = "length"
        self.route = None  # makes the experts of token ids under a version, where they are asked for
        self.spoil = dict  # changes a reply that was right
        self.cuts = 0  # so many completions end after a token, as if a pause cut them
        self.protocol = ROLLOUT_PROTOCOL
        self.seeds = []
        self.asked = []  # the bodies of the completions
        self.running = self.most = 0
        self.updates = []  # the calls of weight updates
        self.probed = None  # log-probabilities of the tokens of a probe, whatever these are

    async def completions(self, request):
        body = await request.json()
        if body.get("prompt_logprobs") is not None and self.probed is not None:
            entries = [{str(token): {"logprob": value}} for token, value in zip(body["prompt"][1:], self.probed)]  # noqa: B905
            return web.json_response(
                reply([2], [-1.0], "length", [(0, self.version)], prompt_logprobs=[None, *entries])
            )
        self.seeds.append(body.get("seed"))
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.delay_s if self.takes is None else self.takes(body))
            if self.drop:
                request.transport.close()
            if self.status != 200 or self.body is not None:
                return web.Response(status=self.status, text=self.body or '{"error": {"message": "scripted"}}')
            begun = body.get("continued", 0)
            tokens = tokens_of(body["prompt"][: len(body["prompt"]) - begun], body.get("seed"))[begun:]
            tokens = tokens[: body.get("max_tokens", len(tokens))]
            cut = self.cuts > 0 and len(tokens) > 1
            self.cuts -= cut
            tokens = tokens[:1] if cut else tokens
            routed = self.route and body.get("routes")
            found = reply(
                tokens,
                [-1.0] * len(tokens),
                "abort" if cut else self.finish,
                [(0, self.version)],
                routes=self.route([*body["prompt"], *tokens][:-1], self.version) if routed else None,
            )
            return web.json_response(self.spoil(found))
        finally:
            self.running -= 1

    async def load(self, request):
        if self.body is not None:
            return web.Response(text=self.body)
        return web.json_response(
            {
                "running": self.running,
                "waiting": 0,
                "generated_tokens": 10 * len(self.seeds),
                "weight_version": self.version,
            }
        )

    async def update(self, request):
        self.updates.append(request.path)
        return web.json_response({})

    async def finish_update(self, request):
        body = await request.json()
        self.version = body["weight_version"]
        probed = self.probed if body.get("probe") and self.probed is not None else []
        return web.json_response({"weight_version": self.version, "logprobs": list(probed)})

    async def health(self, request):
        return web.json_response({"protocol": self.protocol, "world_size": 1})

    @web.middleware
    async def mute(self, request, handler):
        if self.silent:
            await asyncio.sleep(3600)
        return await handler(request)

    @contextlib.asynccontextmanager
    async def serving(self, port=0):
        """Serve within the block; gives the URL."""
        app = web.Application(middlewares=[self.mute])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.get("/load", self.load),
                web.get("/health", self.health),
                web.post("/finish_weight_update", self.finish_update),
                *(
                    web.post(f"/{route}", self.update)
                    for route in ("pause", "resume", "begin_weight_update", "update_weights")
                ),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def accept(instance):
    """The check of an instance that arrives finds nothing."""


@contextlib.asynccontextmanager
async def publishing(pool, version, check=accept):
    """A trainer that gives each instance of a training the version, as soon as it waits for it. Gives an object whose
    `version` may change."""
    given = SimpleNamespace(version=version)

    async def publish():
        while True:
            for one in [one for one in pool.members() if one.version != given.version]:
                one.begin_update()
                try:
                    await one.client.call(FinishUpdate(given.version))
                except MetronomeError as error:
                    pool.leave_out(one, error)
                else:
                    one.record_version(given.version)
                    pool.admit_instance(one)
            await asyncio.sleep(0.01)

    pool.check_arrivals(check)
    task = asyncio.create_task(publish())
    try:
        yield given
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Scores:
    """A verifier that scores with the number of tokens; `calls`: how many responses each call had."""

    def __init__(self, per_response=True):
        self.per_response = per_response
        self.calls = []

    async def score(self, prompt, responses):
        self.calls.append(len(responses))
        return [Score(float(response.length)) for response in responses]


async def until(condition, what, within_s=20.0):
    """Wait for something that happens in the same event loop."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {within_s:g} s for {what}") from None
