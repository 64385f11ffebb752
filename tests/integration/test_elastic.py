"""Instances of a running job that die, hang, err, come and go (contract 7).

Whatever happens to them, every response of every step is trained exactly once, on the step's weights, and the final weights
are those of a run that nothing happened to, bit for bit: `rollout.deterministic` and `train.consume = "prompt_order"`.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from types import SimpleNamespace

import aiohttp
import psutil
import pytest
import torch
from aiohttp import web
from conftest import ROOT, config_of, launch, overrides, wait_for, write_config
from safetensors.torch import load_file

from engine.rollout.fleet import instance_command
from engine.run_folder import read_lines
from engine.trace import read_spans

pytestmark = pytest.mark.faults

STEPS, PROMPTS, GROUP = 10, 8, 4
SAME = ("step", "weight_version", "versions_seen", "reward_mean", "response_length_mean", "trained_tokens", "loss", "grad_norm")
"""Keys of steps.jsonl that no fault may change."""


REWARD = """
import time
from pathlib import Path

def reward(prompt, responses):
    time.sleep(0.02)
    while Path({gate!r}).exists():
        time.sleep(0.02)
    return [sum(token % 2 == 0 for token in r.token_ids) / max(1, len(r.token_ids)) for r in responses]
"""
"""Waits while there is a file, so that no step ends while a test waits for something."""


def recipe(settings, folder):
    """A run in `folder`. One thread each, however many instances there are: their number must change no bit."""
    cores = sorted(os.sched_getaffinity(0))
    (folder / "gated.py").write_text(REWARD.format(gate=str(folder / "gate")))
    return settings | {
        "run.output": str(folder), "train.steps": STEPS, "train.prompts_per_step": PROMPTS, "train.consume": "prompt_order",
        "train.devices": cores[:1], "rollout.instances": 2, "rollout.devices": cores[-1:] * 2, "rollout.deterministic": True,
        "rollout.group_size": GROUP, "rollout.concurrency": 1, "rollout.max_new_tokens": 40, "rollout.max_context": 96,
        "rollout.heartbeat_s": 1.5, "reward.function": f"{folder}/gated.py:reward", "reward.timeout_s": 200,
    }  # fmt: skip


@pytest.fixture
def two(settings, tmp_path):
    """A run with two instances."""
    return recipe(settings, tmp_path)


@pytest.fixture
def one(two):
    """A run with one instance."""
    return two | {"rollout.instances": 1, "rollout.devices": two["rollout.devices"][:1]}


@pytest.fixture(scope="module")
def shared():
    """What the undisturbed run left, once it has run."""
    return {}


@pytest.fixture
def undisturbed(shared, settings, tmp_path_factory):
    """(final weights, lines of steps.jsonl) of the run that nothing happens to."""
    if not shared:
        folder = tmp_path_factory.mktemp("undisturbed")
        code, output = launch(recipe(settings, folder), folder)
        assert code == 0, output
        shared.update(result=outcome(folder / "run"))
    return shared["result"]


def outcome(folder):
    return load_file(folder / "policy/model.safetensors"), list(read_lines(folder / "steps.jsonl"))


class Job:
    """A launcher that runs, its instances' processes, and what its registry says."""

    def __init__(self, settings, folder):
        self.settings, self.folder, self.gate = settings, folder / "run", folder / "gate"
        config = write_config(settings, folder)
        self.log = (folder / "output").open("w+")
        self.process = subprocess.Popen([sys.executable, "-m", "engine.launch", "--config", str(config)],
                                        stderr=self.log, stdout=self.log, cwd=ROOT)

    def call(self, route, body=None):
        return json.loads(self.ask(route, body))

    def ask(self, route, body=None):
        address = (self.folder / "rollout.address").read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(f"http://{address}{route}", data), timeout=10) as reply:
            return reply.read()

    def instances(self):
        """By name; {} while the registry does not listen."""
        self.check()
        with contextlib.suppress(OSError, urllib.error.URLError):
            return {one["name"]: one for one in self.call("/status")["instances"]}
        return {}

    def is_(self, name, **expected):
        found = self.instances().get(name, {})
        return all(found.get(key) == value for key, value in expected.items())

    def works(self, name):
        """It holds a group."""
        return self.instances().get(name, {}).get("groups", 0) > 0

    def steps(self):
        path = self.folder / "steps.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def pid(self, name):
        return json.loads((self.folder / f"logs/{name}.address").read_text())["pid"]

    def wait(self, condition, what):
        wait_for(condition, what)

    def wait_for_samples(self):
        """While rewards are held: until the step is sampled. Nobody holds a group for a while, not only between two steps."""
        idle = time.monotonic()

        def sampled():
            nonlocal idle
            if any(one["groups"] or one["state"] == "updating" for one in self.instances().values()):
                idle = time.monotonic()
            return time.monotonic() - idle > 1.5

        self.wait(sampled, "the end of sampling")

    @contextlib.contextmanager
    def held(self):
        """No reward is given within the block, so the step does not end."""
        self.gate.touch()
        yield
        self.gate.unlink()

    def check(self):
        assert self.process.poll() is None, self.output()

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def end(self, undisturbed):
        """Wait for the end and compare with the run that nothing happened to."""
        assert self.process.wait(timeout=150) == 0, self.output()
        weights, lines = outcome(self.folder)
        expected_weights, expected_lines = undisturbed
        for got, expected in zip(lines, expected_lines, strict=True):
            assert {key: got[key] for key in SAME} == {key: expected[key] for key in SAME}
            assert got["versions_seen"] == [got["step"]]
        rolled = Counter((span["step"], span["group"]) for span in self.spans("rollout"))
        assert rolled == Counter({(step, group): GROUP for step in range(STEPS) for group in range(PROMPTS)})
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        return lines

    def spans(self, name):
        return [span for span in read_spans(self.folder / "trace") if span["name"] == name]

    def periods(self, name):
        """The states an instance was in, in order."""
        return [span["name"] for span in read_spans(self.folder / "trace") if span["lane"] == f"pool {name}"]


@pytest.fixture
def job(tmp_path):
    """Starts a job; ends it after the test."""
    jobs = []

    def start(settings):
        jobs.append(Job(settings, tmp_path))
        return jobs[-1]

    yield start
    for one in jobs:
        one.process.terminate()
        try:
            one.process.wait(20)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.log.close()


@pytest.fixture
def guest(tmp_path):
    """Starts `metronome serve --join` for a job; ends it after the test."""
    started = []

    def start(job):
        command = [sys.executable, "-m", "flows.cli", "serve", "--join", str(job.folder), "--name", "guest"]
        alone = job.settings | {"rollout.instances": 1, "rollout.devices": job.settings["rollout.devices"][:1]}
        command += [part for override in overrides(alone) for part in ("--set", override)]
        started.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_killed_in_the_middle_of_a_step(two, job, undisturbed):
    run = job(two)
    run.wait(lambda: run.steps() >= 2 and run.works("instance-0"), "work of instance-0")
    os.kill(run.pid("instance-0"), signal.SIGKILL)
    with run.held():
        run.wait(lambda: run.is_("instance-0", state="serving", restarts=1), "its return")
        step = run.steps()
    lines = run.end(undisturbed)
    assert lines[-1]["pool_size"] == 2
    assert any(span["step"] > step for span in run.spans("rollout") if span["lane"] == "instance-0")


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_killed_during_a_weight_update(two, job, undisturbed, transport):
    run = job(two | {"weights.transport": transport, "rollout.heartbeat_s": 9})  # not taken for silent before it is killed
    run.wait(lambda: run.steps() >= 2, "two steps")
    with run.held():
        run.wait_for_samples()
        os.kill(run.pid("instance-1"), signal.SIGSTOP)  # else its update would be over in a moment
    run.wait(lambda: run.is_("instance-1", state="updating"), "an update")
    os.kill(run.pid("instance-1"), signal.SIGKILL)
    run.wait(lambda: "instance-1" not in run.instances(), "its end")
    with run.held():
        run.wait(lambda: run.is_("instance-1", state="serving", restarts=1), "its return")
    run.end(undisturbed)
    periods = run.periods("instance-1")
    again = len(periods) - 1 - periods[::-1].index("starting")  # here begins the process that followed
    assert "updating" in periods[again - 2 : again]  # "silent" for the moment between the broken connection and its death


def test_stopped_for_20_s(one, job, undisturbed):
    """The only one: the run waits for it, and it comes back through a weight update of its own."""
    run = job(one)
    run.wait(lambda: run.steps() >= 2 and run.works("instance-0"), "work of instance-0")
    stopped = psutil.Process(run.pid("instance-0"))
    stopped.suspend()
    began, steps = time.monotonic(), run.steps()
    run.wait(lambda: run.is_("instance-0", state="silent", groups=0), "its silence to be noticed")
    assert time.monotonic() - began < 8
    time.sleep(max(0.0, began + 20 - time.monotonic()))
    assert run.steps() <= steps + 1
    stopped.resume()
    run.end(undisturbed)
    assert Counter(run.periods("instance-0"))["silent"] == 1
    assert Counter(run.periods("instance-0"))["starting"] == 1  # it is the same process


def test_dropped_connections_and_500s(one, job, undisturbed, another, tmp_path):
    run = job(one)
    with proxy_to(another(run)) as proxy:
        run.wait(lambda: run.steps() >= 1, "a step")
        run.call("/join", {"name": "proxied", "url": proxy.url})
        with run.held():
            run.wait(lambda: run.is_("proxied", state="serving"), "it to serve")
        run.wait(lambda: run.works("proxied"), "its work")
        proxy.mode = "500"
        run.wait(lambda: run.instances()["proxied"]["breaker"] != "closed", "its breaker to open")
        proxy.mode = "pass"
        with run.held():
            run.wait(lambda: run.is_("proxied", breaker="trial"), "the time of its trial")
        run.wait(lambda: run.is_("proxied", breaker="closed") and run.works("proxied"), "the trial")
        proxy.mode = "drop"
        with run.held():
            run.wait(lambda: run.is_("proxied", state="silent", groups=0), "its silence")
            proxy.mode = "pass"
            run.wait(lambda: run.is_("proxied", state="serving"), "its return")
        run.end(undisturbed)
    assert proxy.faults["500"] >= 3
    assert proxy.faults["drop"] >= 1


def test_one_joins_and_one_leaves(two, job, another, undisturbed):
    run = job(two)
    url = another(run)
    run.wait(lambda: run.steps() >= 2, "two steps")
    run.call("/join", {"name": "late", "url": url})
    with run.held():
        run.wait(lambda: run.is_("late", state="serving"), "it to serve")
    run.wait(lambda: run.works("instance-1"), "work of instance-1")
    run.call("/leave", {"name": "instance-1"})
    with run.held():
        run.wait(lambda: "instance-1" not in run.instances(), "it to leave")
        figures = run.ask("/metrics").decode()
    assert "metronome_pool_size 2.0" in figures
    assert 'metronome_pool_instance_tokens_per_s{instance="late"}' in figures
    assert re.search(r"^metronome_step_loss -?[0-9.e-]+$", figures, re.MULTILINE)
    lines = run.end(undisturbed)
    assert lines[-1]["pool_size"] == 2
    assert any(span["lane"] == "late" for span in run.spans("rollout"))
    assert run.periods("instance-1")[-1] == "draining"


def test_all_are_killed_and_one_comes_and_leaves(two, job, guest, undisturbed):
    """It comes and leaves as users have it: by `metronome serve --join` and SIGTERM."""
    run = job(two | {"rollout.restarts": 0})
    run.wait(lambda: run.steps() >= 2 and run.works("instance-0"), "work")
    for name in ("instance-0", "instance-1"):
        os.kill(run.pid(name), signal.SIGKILL)
    run.wait(lambda: not run.instances(), "their end to be noticed")
    joined = guest(run)
    run.wait(lambda: run.is_("guest", state="serving"), "the guest")
    lines = run.end(undisturbed)
    assert lines[-1]["pool_size"] == 1
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(timeout=30) == 0


@pytest.fixture
def another(tmp_path):
    """Starts an instance that does not belong to the job; gives its URL."""
    with contextlib.ExitStack() as stack:

        def start(job):
            config, port_file = config_of(job.settings), tmp_path / "another.address"
            command, env = instance_command(config, config.model.path, "another", 0, port_file)
            process = subprocess.Popen(command, env=os.environ | env, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            wait_for(port_file.exists, "the other instance")
            return f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"

        yield start


@contextlib.contextmanager
def proxy_to(target):
    """Runs in a thread of its own."""
    state = SimpleNamespace(mode="pass", url="", faults=Counter())
    loop, started = asyncio.new_event_loop(), threading.Event()

    async def forward(request):
        if state.mode != "pass":
            state.faults[state.mode] += 1
        if state.mode == "drop":
            request.transport.close()
            return web.Response()
        if state.mode == "500":
            return web.Response(status=500, text="scripted")
        async with state.session.request(request.method, target + str(request.rel_url), data=await request.read()) as answer:
            body = await answer.read()
            if state.mode == "drop":
                request.transport.close()
            return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    async def serve():
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        state.session = aiohttp.ClientSession()
        started.set()

    async def end():
        await state.session.close()
        loop.stop()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(10)
    yield state
    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join(10)
