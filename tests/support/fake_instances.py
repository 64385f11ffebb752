"""Rollout instances without sockets, behind the HTTP session of the real InstanceClient; tests say how they fare."""

import asyncio
import json
import time
from typing import ClassVar

import aiohttp

from engine.errors import ProcessDied
from engine.orchestrator.publish.probe import make_probe
from engine.run.instance_process import InstanceProcess
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.replies import reply

PROBE = make_probe(64, 6, 64, "float32")
BUCKETS = 2
SPOILED = 1000
"""Added to the number of weights that are not the trainer's."""


def logprobs(weights):
    """Of the probe's tokens but the first, under the weights of this number."""
    return [-1.0 - 0.01 * weights] * (len(PROBE.token_ids) - 1)


class FakeInstance:
    """`weights`: the number of what it computes with: its version, unless they are spoiled."""

    def __init__(self, latency):
        self.latency = latency
        """Gives the seconds until the next answer."""
        self.errs = False
        self.spoils = False
        """The next weights that it takes over are not those that it was given."""
        self.going_on = asyncio.Event()
        """Not set: it hangs."""
        self.going_on.set()
        self.start()

    def start(self):
        """As its process is after a start."""
        self.died = asyncio.get_running_loop().create_future()
        self.version = 0
        self.weights = 0
        self.paused = False
        self.update = None
        self.staged = set()
        self.running = 0
        self.aborts = 0

    def die(self):
        """Whoever waits for an answer of it notices."""
        if not self.died.done():
            self.died.set_result(None)

    async def answer(self, route, body):
        """(status, JSON). Raises what a broken connection raises."""
        died = self.died
        work = asyncio.ensure_future(self._answer(*route.partition("?")[::2], body))
        try:
            await asyncio.wait([work, died], return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
        if died.done():
            raise aiohttp.ClientConnectionError("its process died")
        return work.result()

    async def _answer(self, path, query, body):
        await asyncio.sleep(self.latency())
        await self.going_on.wait()
        if self.errs and path not in ("/health", "/load"):
            return 500, {}
        return await getattr(self, path.rsplit("/", 1)[-1])(body or {}, query)

    async def health(self, body, query):
        return 200, {"protocol": ROLLOUT_PROTOCOL, "world_size": 1}

    async def load(self, body, query):
        return 200, {"running": self.running, "waiting": 0, "generated_tokens": 0, "weight_version": self.version}

    async def init_weight_transfer_engine(self, body, query):
        return 200, {}

    async def pause(self, body, query):
        self.paused = True
        self.aborts += query == "mode=abort"
        while self.running > 0:  # a start resets it while earlier requests end
            await asyncio.sleep(0.01)
        return 200, {}

    async def begin_weight_update(self, body, query):
        await self.pause(body, query)
        self.update = set()
        return 200, {}

    async def update_weights(self, body, query):
        info = body["update_info"]
        if info.get("staged"):
            self.staged = {one for one in self.staged if one[0] == info["version"]}
            self.staged.add((info["version"], info["bucket"]))
        elif self.update is None:
            return 409, {}
        elif info["transport"] == "base":
            self.update = {(500 if info["perturb"] else 0, bucket) for bucket in range(BUCKETS)}
        elif info["transport"] == "staged":
            self.update = self.staged
            self.staged = set()
        else:
            self.update.add((info["version"], info["bucket"]))
        return 200, {}

    async def finish_weight_update(self, body, query):
        held = {version for version, _ in self.update or ()}
        if len(held) != 1 or len(self.update) != BUCKETS:
            return 503, {}
        self.weights = held.pop() + SPOILED * self.spoils
        self.version = body["weight_version"]
        self.spoils = False
        self.update = None
        self.paused = False
        return 200, {"weight_version": self.version, "logprobs": logprobs(self.weights)}

    async def resume(self, body, query):
        if self.update is not None:
            return 409, {}
        self.paused = False
        return 200, {}

    async def completions(self, body, query):
        """The token of a response is the number of the weights that sampled it."""
        if self.paused:
            return 409, {}
        if "prompt_logprobs" in body:
            values = zip(PROBE.token_ids[1:], logprobs(self.weights), strict=True)
            entries = [None, *({str(token): {"logprob": value}} for token, value in values)]
            return 200, reply([], [], "length", [], prompt_logprobs=entries)
        weights = self.weights
        version = self.version
        aborts = self.aborts
        self.running += 1
        try:
            for _ in range(5):
                await asyncio.sleep(self.latency())
                if self.aborts != aborts:
                    return 409, {}
        finally:
            self.running -= 1
        return 200, reply([weights], [-1.0], "length", [(0, version)])


class FakeSession:
    """Of aiohttp, as far as InstanceClient uses it: `instances` by their URL."""

    def __init__(self):
        self.instances = {}

    def request(self, method, url, data=None, headers=None, allow_redirects=False):
        base, slash, route = url.removeprefix("http://").partition("/")
        return _Exchange(self.instances["http://" + base].answer(slash + route, json.loads(data or b"{}")))

    async def close(self):
        pass


class _Exchange:
    content_type = "application/json"
    content_length = None
    headers: ClassVar = {}

    def __init__(self, work):
        self._work = work

    async def __aenter__(self):
        self.status, self._body = await self._work
        return self

    async def __aexit__(self, *exception):
        pass

    @property
    def content(self):
        return self

    async def readany(self):
        body, self._body = self._body, None
        return json.dumps(body).encode() if body is not None else b""


class FakeProcess:
    """Of a declared instance: engine.run.process.Child and engine.run.instance_process.InstanceProcess in one."""

    may_restart = InstanceProcess.may_restart

    def __init__(self, machine, number):
        self.name = f"instance-{number}"
        self.restarts = 0
        self.faults = 0
        self.began = time.monotonic()
        self.machine = machine
        self.start()

    def start(self):
        fake, self.port = self.machine.fake()
        self.child = _FakeChild(fake)

    async def serves(self, timeout_s):
        await asyncio.sleep(0.2)
        if self.machine.chance.random() < 0.2:
            raise ProcessDied(f"{self.name} could not start")
        return "127.0.0.1", self.port


class _FakeChild:
    def __init__(self, fake):
        self._fake = fake
        self._died = fake.died

    @property
    def alive(self):
        return not self._died.done()

    @property
    def was_killed(self):
        return False

    def stop(self, grace_s):
        self._fake.die()

    def how_it_ended(self):
        return "was ended"


class FakeProcesses:
    """engine.orchestrator.pool.pool.InstanceProcesses."""

    token = "secret"

    def __init__(self, declared):
        self.declared = declared

    def restart(self, one):
        one.restarts += 1
        one.faults += 1
        one.start()

    async def close(self):
        pass
