"""All that a disturbed run needs: servers, a deployment, a watchdog, a worker, the run, and the guest."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil

from chaos.guest import Guest, namespaces_work
from chaos.progress import Progress
from support import flow_runs
from support.brake import braked, slow_down
from support.ports import free_port
from support.runs import ROOT, overrides, seeded_settings, wait_for
from support.stack import BUCKET, QUICKLY, Services
from tasks.cluster.prefect_api import CLIENT_AUTH

PATIENCE_S = 600.0
"""Longest wait for a start, an end or a step; a quiet machine needs a tenth."""
CRASHES = 100_000
"""Starts within half an hour after which the watchdog gives a run up: never, since they are ours."""
SPACE_MB = 512
"""Size of the file system that has the run folders."""
FILLING = "filling"
"""A file that takes all space in the place of the runs."""
WORKER = "chaos"
TOKEN = "token-of-the-chaos"
"""The guest joins by an address, so it can not read the token in the run folder."""
LOOK_S = 0.5
BACK_S = 5.0
"""Seconds after which a dead worker or guest is started again, as a node's supervisor does."""
ROLES = {
    "flow": "prefect.engine",
    "orchestrator": "engine.orchestrator.launch",
    "agent": "engine.trainer.ranks.agent",
    "rank": "engine.trainer.rank --",
    "instance": "engine.instance.embedded",
    "verifier": "engine.verifier.worker",
}
"""What the command line of a process of the flow run has."""


class World:
    """A place for runs, and servers once they are started. `Disturbed` is a run in it."""

    def __init__(self, folder, model, problems):
        self.folder = folder
        self.place = folder / "runs"
        self.model = model
        self.problems = problems
        self.join_port = free_port()
        self.has_namespaces = namespaces_work()
        self.has_space_of_its_own = False
        self.servers_went = False
        """Whether a fault has killed a server so far. (The worker's log has the lines of all runs.)"""
        self.services = Services(folder / "services", watchdog=(*QUICKLY, "--starts", str(CRASHES)))
        self._ends = contextlib.ExitStack()

    def __enter__(self):
        self.place.mkdir(parents=True)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SPACE_MB}m", "chaos", str(self.place)], stderr=subprocess.DEVNULL
        )
        self.has_space_of_its_own = mounted.returncode == 0
        if self.has_space_of_its_own:
            self._ends.callback(subprocess.run, ["umount", "-l", str(self.place)])
        braked(self.folder, 0)
        return self

    def serve(self):
        """Start the servers and the worker."""
        try:
            self.services.environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"
            self._ends.enter_context(self.services)
            os.environ[CLIENT_AUTH] = self.services.environment[CLIENT_AUTH]
            self._ends.callback(os.environ.pop, CLIENT_AUTH)
            self._deploy()
            self.services.worker("cpu", WORKER, {"METRONOME_TOKEN": TOKEN})
        except BaseException:
            self._ends.close()
            raise

    def __exit__(self, *_):
        self._ends.close()

    @property
    def environment(self):
        """Of a process that is to find the servers."""
        return {
            **os.environ,
            **self.services.environment,
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "METRONOME_TOKEN": TOKEN,
        }

    @property
    def permitted(self):
        """What the machine permits (chaos.schedule)."""
        return frozenset(("no space",) * self.has_space_of_its_own + ("down",) * self.has_namespaces)

    def settings(self, steps):
        """Of a run whose numbers depend on nothing but its seed."""
        reward = f"{self.folder / 'reward.py'}:reward"
        return seeded_settings(self.model, self.problems, self.place, reward) | {
            "reward.workers": 2,
            "reward.timeout_s": 20,
            "rollout.instances": 2,
            "rollout.timeout_s": 60,
            "rollout.listen": f"127.0.0.1:{self.join_port}",
            "train.steps": steps,
            "train.timeout_s": 20,
        }

    def slow_down(self, seconds):
        """Seconds that the reward of a group takes from now on."""
        slow_down(self.folder, seconds)

    def _deploy(self):
        command = [sys.executable, "-m", "flows.cli", "deploy"]
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout + done.stderr


class Disturbed:
    """A run of the deployment with its guest, and the people and supervisors who look after it."""

    def __init__(self, world, name, steps, say, changes=None):
        """`say` is called with every line about the run; `changes`: settings that differ."""
        self.world = world
        self.name = name
        self.folder = world.place / name
        self.guest_log = world.folder / f"{name}-guest.log"
        self.flow_runs = []
        """Ids; the last one is under way."""
        self.resumed_by_hand = []
        """What the run said each time that it had ended and a person started it again."""
        self.starts = Counter()
        """How often the supervisors started a worker or a guest again."""
        self.excused = 0
        """How often a person may still have to start it again (after a full disk)."""
        self.unexpected = []
        """Ends that nothing excuses."""
        self.say = say
        settings = world.settings(steps) | {"run.name": name, "checkpoint.path": f"s3://{BUCKET}/chaos"}
        settings |= changes or {}
        self._overrides = overrides(settings)
        self.guest = Guest(
            settings=settings | {"rollout.instances": 1},
            join_port=world.join_port,
            log=self.guest_log,
            environment=world.environment,
            namespace=world.has_namespaces,
        )
        self.progress = Progress(self.folder / "steps.jsonl")
        self._ended = threading.Event()
        self._held = set()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self._stack.enter_context(self.guest)
        self._stack.enter_context(self.progress)
        self._start(resume=False)
        self._keeper.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._keeper.join(30)
        self._stack.close()

    def _start(self, resume):
        parameters = {"overrides": self._overrides, "resume": resume}
        self.flow_runs.append(flow_runs.start(self.api, "pipeline", parameters))

    @property
    def api(self):
        """The Prefect server's API."""
        return self.world.services.environment["PREFECT_API_URL"]

    @property
    def worker(self):
        """The Prefect worker, as a service."""
        return self.world.services[WORKER]

    # who looks after it ---------------------------------------------------------------------------

    def _keep(self):
        """Supervisors of worker and guest. They leave alone what a fault holds."""
        while not self._ended.wait(BACK_S):
            with contextlib.suppress(Exception):
                if not self.worker.child.alive:
                    self.starts["worker"] += 1
                    self.worker.start()
            if self.progress.newest >= 0:
                before = self.guest.starts
                self.guest.keep()
                self.starts["guest"] += self.guest.starts - before

    def state(self):
        """The flow run's state, None while the server does not tell."""
        try:
            return flow_runs.state(self.api, self.flow_runs[-1], within_s=2.0)
        except OSError:
            return None

    def look_after(self):
        """Whether the run is complete. Start it again, as a person does, if it has ended otherwise."""
        now = self.state()
        if now is None or now["type"] not in ("FAILED", "CANCELLED", "COMPLETED"):
            return False
        if now["type"] == "COMPLETED":
            return True
        told = f"{now['name']}: {now['message']}"
        if self.excused and "No space left" in told:
            if (self.world.place / FILLING).exists():
                return False  # a person makes space first
            self.excused -= 1
            self.resumed_by_hand.append(told)
        else:
            self.unexpected.append(f"the run ended as {told}")
            assert len(self.unexpected) < 5, f"the run ends again and again: {self.unexpected}"
        self.say(f"resumed by hand; the run had ended as {told}")
        self._start(resume=True)
        return False

    def wait(self, condition, what, timeout_s=PATIENCE_S):
        """For the condition, while the run is looked after."""

        def met():
            time.sleep(LOOK_S)
            self.look_after()
            return condition()

        wait_for(met, what, timeout_s)

    # its processes --------------------------------------------------------------------------------

    def processes(self, role):
        """Those of a role that live, the oldest first."""
        if role == "worker":
            return _tree(self.worker.child.pid, "prefect worker start")
        if role == "guest":
            return _tree(self.guest.process.pid, "") if self.guest.process is not None else []
        return _alive(pid for pid, line in self.own().items() if ROLES[role] in line)

    def own(self):
        """Command lines of all processes of its flow runs, by process id."""
        return {pid: line for run in self.flow_runs for pid, line in flow_runs.processes(run).items()}

    def largest(self):
        """The process that a system out of memory would end; None if there is none now."""
        found = _alive(self.own()) + self.processes("guest")
        return max(found, key=lambda one: one.memory_info().rss, default=None)


def _alive(pids):
    """The processes that have not ended, the oldest first."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found.append((process.create_time(), pid, process))
    return [process for _, _, process in sorted(found, key=lambda one: one[:2])]


def _tree(pid, part):
    """A process and its descendants, those with `part` in their command line; no guards."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        return [one for one in tree if part in (line := " ".join(one.cmdline())) and "support/guard" not in line]
    except psutil.Error:
        return []
