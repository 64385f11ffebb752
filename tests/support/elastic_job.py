"""A running job, on either engine, whose instances tests stop, kill, cut off, add and remove (faults.py).

What holds whatever happens is checked by `Job.end`: every response of every step was trained exactly once, on the
step's weights.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import psutil

from engine.data.loader import sampling_seed
from engine.run.commands import instance_command
from engine.run.files import read_lines
from engine.run.process import LIFELINE, hold_lifeline
from engine.run.trace import read_spans
from engine.wire import record
from engine.wire.access_token import TOKEN_FILE, authorization_headers
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.faults import proxy_to
from support.runs import ROOT, config_of, overrides, wait_for, write_config

PROMPTS = 8
GROUP = 4

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


def recipe(settings, folder, steps):
    """A run in `folder`."""
    (folder / "gated.py").write_text(REWARD.format(gate=str(folder / "gate")))
    return settings | {
        "run.output": str(folder),
        "train.steps": steps,
        "train.prompts_per_step": PROMPTS,
        "train.record": True,
        "rollout.instances": 2,
        "rollout.group_size": GROUP,
        "rollout.concurrency": 1,
        "rollout.max_new_tokens": 40,
        "rollout.max_context": 96,
        "reward.function": f"{folder}/gated.py:reward",
        "reward.timeout_s": 200,
    }


def exact_recipe(settings, folder, steps, instances=1):
    """The same whose numbers depend on nothing but its seed. One thread each, however many instances there are: their
    number must change no bit."""
    cores = sorted(os.sched_getaffinity(0))
    return recipe(settings, folder, steps) | {
        "train.consume": "prompt_order",
        "train.devices": cores[:1],
        "rollout.instances": instances,
        "rollout.devices": cores[-1:] * instances,
        "rollout.deterministic": True,
    }


OTHERS_TOKEN = "token-of-another-instance"


class Job:
    """An orchestrator that runs, its instances' processes, and what its registry says.
    Ends what it started with its block."""

    def __init__(self, settings, folder, patience_s=90.0):
        """`patience_s`: of every wait."""
        self.settings = settings
        self.patience_s = patience_s
        self.folder = folder / "run"
        self.gate = folder / "gate"
        self._scratch = folder
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self._log = self._stack.enter_context((self._scratch / "output").open("w+"))
        config = write_config(self.settings, self._scratch)
        self.process = self._start(
            [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)],
            stdout=self._log,
            stderr=self._log,
        )
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _start(self, command, env=None, **options):
        """A process that ends with the job, and with the tests however they end."""
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (env or {}) | {LIFELINE: hold_lifeline()},
            start_new_session=True,
            **options,
        )
        self._stack.callback(_end, process)
        return process

    # instances that are not its own ---------------------------------------------------------------

    def guest(self):
        """`metronome serve --join`, under the name "guest"."""
        command = [sys.executable, "-m", "flows.cli", "serve", "--join", str(self.folder), "--name", "guest"]
        alone = self.settings | {"rollout.instances": 1}
        if "rollout.devices" in alone:
            alone["rollout.devices"] = alone["rollout.devices"][:1]
        return self._start([*command, *(part for override in overrides(alone) for part in ("--set", override))])

    def another(self):
        """An instance that nobody told of the job, once it serves: (process, URL)."""
        config = config_of(self.settings)
        port_file = self._scratch / "another.address"
        command, env = instance_command(
            config=config, model=Path(config.model.path), name="another", number=0, port_file=port_file
        )
        process = self._start(command, env | {"METRONOME_TOKEN": OTHERS_TOKEN})
        self.wait(lambda: port_file.exists() or process.poll() is not None, "the other instance")
        return process, f"http://127.0.0.1:{json.loads(port_file.read_text())['port']}"

    def proxied(self, url):
        """Have the instance at that URL join behind a proxy, under the name "proxied"; the proxy."""
        proxy = self._stack.enter_context(proxy_to(url))
        self.join("proxied", proxy.url)
        return proxy

    def join(self, name, url):
        """Have the instance of `another` join, at this URL."""
        self.call("/join", {"protocol": ROLLOUT_PROTOCOL, "name": name, "url": url, "token": OTHERS_TOKEN})

    # what it says ---------------------------------------------------------------------------------

    def call(self, route, body=None):
        return json.loads(self.ask(route, body))

    def ask(self, route, body=None):
        address = (self.folder / "rollout.address").read_text().strip()
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        right = authorization_headers((self.folder / TOKEN_FILE).read_text())
        with opener.open(urllib.request.Request(f"http://{address}{route}", data, right), timeout=10) as reply:
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

    def serve(self, *names):
        """Whether all of them take prompts."""
        found = self.instances()
        return all(found.get(name, {}).get("state") == "serving" for name in names)

    def works(self, name):
        """It holds a group."""
        return self.instances().get(name, {}).get("groups", 0) > 0

    def steps(self):
        path = self.folder / "steps.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def spans(self, name):
        return [span for span in read_spans(self.folder / "trace") if span["name"] == name]

    def periods(self, name):
        """The states an instance was in, in order."""
        return [span["name"] for span in read_spans(self.folder / "trace") if span["lane"] == f"pool {name}"]

    def last_states(self, name):
        """The one in which each of its stays ended, but for its silence before that: a process, or its return."""
        ends = []
        for state in self.periods(name):
            if state == "starting":
                ends.append(state)
            elif state != "out":  # also a moment between the broken connection and the death
                ends[-1] = state
        return ends

    def processes(self, name):
        """Of one of its own instances, the server first."""
        server = psutil.Process(json.loads((self.folder / f"logs/{name}.address").read_text())["pid"])
        return [server, *server.children(recursive=True)]

    def is_ready(self):
        """Whether the trainer has loaded its models."""
        self.check()
        with contextlib.suppress(OSError, urllib.error.URLError):
            return self.call("/status").get("ready", False)
        return False

    # waiting --------------------------------------------------------------------------------------

    def wait(self, condition, what):
        wait_for(condition, what, self.patience_s)

    def wait_for_samples(self):
        """While rewards are held: until the step is sampled.
        Nobody holds a group for a while, not only between two steps."""
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

    # the end --------------------------------------------------------------------------------------

    def check(self):
        assert self.process.poll() is None, self.output()

    def output(self):
        self._log.seek(0)
        return self._log.read()

    def end(self, lag=0):
        """Wait for its end, as it should be; the lines of steps.jsonl. `lag`: how many versions before the step's its
        responses may have."""
        assert self.process.wait(timeout=max(150.0, self.patience_s)) == 0, self.output()
        lines = list(read_lines(self.folder / "steps.jsonl"))
        check_on_policy(lines, self.settings["train.steps"], lag)
        rolled = Counter((span["step"], span["group"]) for span in self.spans("rollout"))
        assert rolled == Counter({(step, group): GROUP for step in range(len(lines)) for group in range(PROMPTS)})
        self.check_trained_once(lines, lag)
        return lines

    def check_trained_once(self, lines, lag=0):
        """By what the trainer was given (train.record) and the tokens that it counted."""
        given = {line["step"]: [] for line in lines}
        for entry in record.read_record(self.folder / "record.msgpack"):
            given[entry.step] += entry.window()
        problems = len(list(read_lines(Path(self.settings["data.train"]))))
        for line in lines:
            groups = given[line["step"]]
            step = line["step"]
            assert sorted(group.index for group in groups) == list(range(PROMPTS))
            for group in groups:
                epoch = (step * PROMPTS + group.index) // problems
                seeds = [sampling_seed(0, epoch, group.prompt.id, number) for number in range(GROUP)]
                if self.settings.get("rollout.engine") == "vllm":  # without rollout.deterministic it gets none
                    seeds = [None] * GROUP
                assert [response.seed for response in group.responses] == seeds
                versions = [version for response in group.responses for _, version in response.versions]
                assert set(versions) <= set(range(max(0, step - lag), step + 1))
                assert lag or all(response.versions == ((0, step),) for response in group.responses)
            tokens = sum(
                len(group.prompt.token_ids) + len(one.token_ids) for group in groups for one in group.responses
            )
            assert line["trained_tokens"] == tokens


def check_on_policy(lines, steps, lag=0):
    assert [line["step"] for line in lines] == list(range(steps))
    for line in lines if not lag else []:
        assert line["versions_seen"] == [line["step"]]
        assert line["max_ratio_gap"] <= 1e-3


def _end(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
