"""The instance that joins the run: in a network namespace of its own where the machine permits one, behind the link.

Both sides believe that they are on one machine: the orchestrator reaches the guest at a port of its own loopback, and
the guest reaches the orchestrator at one of its own. Between the two are two proxies and a pair of virtual devices.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

from engine.run.process import LIFELINE, hold_lifeline
from support.ports import free_port
from support.runs import ROOT, overrides

LOOPBACK = "127.0.0.1"
NETWORK = f"10.213.{os.getpid() % 250}"
HERE = f"{NETWORK}.1"
THERE = f"{NETWORK}.2"
NAMESPACE = f"metronome-chaos-{os.getpid()}"
"""A name for each process of the chaos tests, so that two of them may run beside each other."""
DEVICES = tuple(f"mchaos{os.getpid()}{end}" for end in "ab")
NAME = "guest"
PYTHON = [sys.executable, "-m"]
START_S = 30.0


def namespaces_work():
    """Whether this process may make a network namespace and devices."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{NAMESPACE}-probe"], stderr=-3).returncode == 0
    subprocess.run(["ip", "netns", "delete", f"{NAMESPACE}-probe"], stderr=-3)
    return made


class Guest:
    """`metronome serve --join`, the proxies and the namespace. `keep` starts it again when it has ended."""

    def __init__(self, settings, join_port, log, environment, namespace):
        """`join_port`: of rollout.listen. `namespace`: whether it has a network namespace of its own."""
        self.namespace = namespace
        self.starts = 0
        self.process = None
        self._log = log
        self._environment = environment | {LIFELINE: hold_lifeline()}
        self._join_port = join_port
        self._port = free_port()
        self._seen_port = self._port if namespace else free_port()
        self._called_port = join_port if namespace else free_port()
        self._settings = settings
        self._links = []

    def __enter__(self):
        join = self._join_port
        own = self._port
        if self.namespace:
            self._make_namespace()
            outer = [f"{LOOPBACK}:{own}={THERE}:{own}", f"!{HERE}:{join}={LOOPBACK}:{join}"]
            inner = [f"{THERE}:{own}={LOOPBACK}:{own}", f"{LOOPBACK}:{join}={HERE}:{join}"]
            self._links = [self._link(outer), self._link(inner, self._inside)]
        else:
            seen = self._seen_port
            pairs = [f"{LOOPBACK}:{seen}={LOOPBACK}:{own}", f"!{LOOPBACK}:{self._called_port}={LOOPBACK}:{join}"]
            self._links = [self._link([*pairs, "--replace", f':{own}"=:{seen}"'])]
        return self

    def __exit__(self, *_):
        self.stop()
        for link in self._links:
            link.stdin.close()
            link.wait(10)
        if self.namespace:
            self._drop_namespace()

    @property
    def _inside(self):
        return ["ip", "netns", "exec", NAMESPACE] if self.namespace else []

    def set(self, mode):
        """What the link does from now on: a mode of chaos.link, or "down"."""
        if self.namespace:
            subprocess.run(["ip", "link", "set", DEVICES[0], "down" if mode == "down" else "up"], check=True)
        if mode != "down":
            self._links[0].stdin.write(f"{mode}\n")
            self._links[0].stdin.flush()

    def spoiled(self):
        """How many of its replies were spoiled so far."""
        self.set("count")
        return int(self._links[0].stdout.readline())

    def keep(self):
        """Start it, again if it has ended: what the node of an instance does."""
        if self.process is not None and self.process.poll() is None:
            return
        self.starts += 1
        command = [*self._inside, *PYTHON, "flows.cli", "serve", "--join", f"{LOOPBACK}:{self._called_port}"]
        command += ["--name", NAME, "--port", str(self._port)]
        command += [part for override in overrides(self._settings) for part in ("--set", override)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdin=-3, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self):
        """End it in good order, by force after some seconds."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _link(self, arguments, inside=()):
        link = subprocess.Popen(
            [*inside, *PYTHON, "chaos.link", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**self._environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )
        assert link.stdout.readline() == "serves\n", f"the link {arguments} did not start"
        return link

    def _make_namespace(self):
        self._drop_namespace()
        for command in (
            f"ip netns add {NAMESPACE}",
            f"ip link add {DEVICES[0]} type veth peer name {DEVICES[1]} netns {NAMESPACE}",
            f"ip addr add {HERE}/30 dev {DEVICES[0]}",
            f"ip link set {DEVICES[0]} up",
            f"ip -n {NAMESPACE} addr add {THERE}/30 dev {DEVICES[1]}",
            f"ip -n {NAMESPACE} link set {DEVICES[1]} up",
            f"ip -n {NAMESPACE} link set lo up",
        ):
            subprocess.run(command.split(), check=True, timeout=START_S)
        time.sleep(0.2)

    def _drop_namespace(self):
        subprocess.run(["ip", "netns", "delete", NAMESPACE], stderr=-3)
        subprocess.run(["ip", "link", "delete", DEVICES[0]], stderr=-3)
