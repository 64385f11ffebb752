"""A thread that follows the processes of a run on a Ray cluster: it copies their logs into the run folder, starts again
what has died, and takes more instances while the cluster has room for them. Another one looks at Ray itself."""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config
from engine.config.placing import on_fewer_nodes
from engine.errors import BadInput, DeadlineError, MetronomeError, clean_text
from engine.run.disk import NO_FILE
from engine.run.instance_process import REFILL_S
from engine.run.placed_process import ActorPlace, News
from engine.run.process import BAD_INPUT
from engine.wire.address import split_address
from tasks.cluster.ray.parts import (
    RANKS,
    SAY_S,
    STOP_S,
    Growth,
    PlacedPart,
    begin,
    end,
    kill,
    log_of,
    out_of_reach,
    raised_there,
    write_log,
)
from tasks.terminal.console import print_error, say
from tasks.terminal.interruption import is_stopping

LOOK_S = 2.0
"""Seconds between two looks at the processes, which cost a few milliseconds each, and at Ray itself, which must answer
in as many."""
BACKOFF_S = 1.0
"""Seconds before a process that ended is started again; each further time doubles them."""
LONGEST_BACKOFF_S = 60.0
"""Most of these seconds."""
MOST_DOUBLINGS = 10
"""Number of times from which on they are the most in any case: a larger power of 2 may be no float."""
NEVER_AGAIN = "is not started again"
SILENCES = 10
"""Number of looks in a row without an answer after which a part of Ray is silent, and lost if it can't come back."""
SPARE_S = 60.0
"""Seconds that Ray has to find another node for lost trainer ranks before a run goes on with fewer
(cluster.least_nodes)."""


class Followed:
    """The processes of a run that Ray has started. A thread of this class changes their parts, and `await_nodes` does
    between two attempts; whoever does holds the lock."""

    def __init__(
        self,
        parts: list[PlacedPart],
        config: Config,
        logs: Path,
        here: ActorPlace,
        growth: Growth,
        watch: RayWatch,
    ) -> None:
        """`logs`: an existing folder."""
        self._parts = parts
        self._config = config
        self._logs = logs
        self._here = here
        self._growth = growth
        self._watch = watch
        self._unwritten: set[str] = set()
        """Logs that could not be written."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cluster", daemon=True)

    def __enter__(self) -> Followed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(STOP_S)

    def _follow(self) -> None:
        while not self._ended.wait(LOOK_S):
            with self._lock:
                try:
                    self.follow_once()
                except Exception as error:  # room that Ray does not take back; this thread must go on for the others
                    print_error(f"warning: the cluster is not followed: {type(error).__name__}: {_first_line(error)}")

    def follow_once(self) -> None:
        """Look at each part once, start again what is due, and take one more instance if there is room."""
        for part in list(self._parts):
            if not self._ended.is_set():
                self._follow_part(part)
        if not self._watch.waits:
            self._grow()

    def _follow_part(self, part: PlacedPart) -> None:
        """Look at a part. One that can't be followed is lost, so that it is started again, unless it was refused."""
        import ray

        try:
            self._look_at(part)
        except Exception as error:  # this thread must go on for the others
            raised = raised_there(error)
            if isinstance(raised, BadInput):
                self._give_up(part, f"can't start on its node and {NEVER_AGAIN}: {_first_line(raised)}")
            elif raised is not None:
                self._lose(part, f"fails on its node: {type(raised).__name__}: {_first_line(raised)}")
            elif isinstance(error, ray.exceptions.RayError):
                self._lose(part, f"is lost with its node: {_first_line(error)}")
            else:
                self._lose(part, f"can't be followed: {type(error).__name__}: {_first_line(error)}")

    def _grow(self) -> None:
        try:
            if any(part.place is None and part.module == RANKS and part.again < math.inf for part in self._parts):
                self._growth.withdraw()  # the room is wanted for trainer ranks
                return
            part = self._growth.grown()
            if part is not None:
                self._parts.append(part)
                begin(part)
        except Exception as error:  # this thread must go on with the parts that there are
            say("instances", f"no further instances: {type(error).__name__}: {_first_line(error)}")
            self._growth.stop()

    def _look_at(self, part: PlacedPart) -> None:
        import ray

        if part.again and time.monotonic() > part.again and not self._watch.waits:
            begin(part)
        if part.answer is None or not ray.wait([part.answer], timeout=0)[0]:
            return
        news = ray.get(part.answer)
        if isinstance(news, ActorPlace):
            part.place = news
            self._counted(part).losses = 0
            say("cluster", f"{part.name} starts on {news.host} ({news.node[:6]})")
            if why := out_of_reach(part, news, self._config, self._here):
                self._growth.stop()
                print_error(f"warning: {why}")
        elif self.has_ended(part, news):
            return
        part.answer = part.actor.look.remote()

    def _lose(self, part: PlacedPart, why: str) -> None:
        then = "" if part.extra else "; it starts again where there is room"
        say(part.stage, f"{part.name} {why}{then}")
        kill(part)  # it may still live where this machine does not reach it
        counted = self._counted(part)
        again = _after(counted.losses)
        counted.losses += 1
        if part.extra:
            self._drop(part, again)
        else:
            part.again = again

    def _give_up(self, part: PlacedPart, why: str) -> None:
        """Do without a part that would end in the same way again. The others go on."""
        part.refused = f"{part.name} {why}"
        say(part.stage, part.refused)
        kill(part)
        if part.extra:  # others may have its room
            self._growth.stop()
            self._drop(part)

    def _counted(self, part: PlacedPart) -> PlacedPart | Growth:
        """What counts the losses of a part: each of the further instances is another part."""
        return self._growth if part.extra else part

    def _drop(self, part: PlacedPart, again: float = 0.0) -> None:
        """Do without an instance above the number with which the run began. `again` as in `Growth.drop`."""
        self._parts.remove(part)
        self._growth.drop(part, again)

    def has_ended(self, part: PlacedPart, news: News) -> bool:
        """Append what a process has printed to its log. If it has ended, decide whether it starts again."""
        self._write(part, news.log)
        if news.code is None:
            return False
        part.answer = None
        if news.code == 0:
            return True
        restarts = self._config.rollout.restarts if part.files else self._config.run.resumes
        part.faults = 1 if time.monotonic() - part.began > REFILL_S else part.faults + 1
        log = log_of(part, self._logs)
        if news.code == BAD_INPUT or part.faults > restarts:
            self._give_up(part, f"ended with {news.code} and {NEVER_AGAIN}; its log: {log}")
        else:
            say(part.stage, f"{part.name} ended with {news.code} and starts again; its log: {log}")
            end([part], self._logs, grace_s=0.0)
            part.again = _after(part.faults)
        return True

    def _write(self, part: PlacedPart, printed: bytes) -> None:
        """A log that can't be written is lost, and the process goes on."""
        try:
            write_log(part, printed, self._logs)
        except OSError as error:
            if part.name not in self._unwritten:
                self._unwritten.add(part.name)
                print_error(f"warning: {log_of(part, self._logs)} can't be written: {error}")

    def await_nodes(self) -> Config:
        """Wait until each further trainer node has a place. Return the run's config; with cluster.least_nodes it may be
        one for fewer nodes. Raises DeadlineError that names those without a place, and MetronomeError if a node that
        is needed, or every instance, is not started again."""
        nodes = [part for part in self._parts if part.module == RANKS]
        with self._lock:
            for part in nodes:
                if part.again == math.inf:  # an earlier attempt went on without it
                    part.again = time.monotonic()
                    part.refused = ""
            self._lose_silent(nodes)
            refused = [part.refused for part in self._parts if part.files]
        if refused and all(refused):
            raise MetronomeError(
                f"none of the instances that Ray starts is left, and the run starts again for no others: {refused[0]}"
            )
        wait_s = self._config.cluster.wait_s
        began = told = time.monotonic()
        while missing := [part for part in nodes if part.place is None]:
            what = f"Ray has not started {', '.join(part.name for part in missing)} again"
            now = time.monotonic()
            fewer = self._fewer(len(nodes) + 1 - len(missing))
            gone = next((part.refused for part in missing if part.refused), "")
            if fewer is not None and (gone or now > began + min(SPARE_S, wait_s)):
                self._leave_out(nodes, fewer, gone or what)
                return fewer
            if gone:
                raise MetronomeError(gone)
            if now > began + wait_s:
                raise DeadlineError(f"{what} within {wait_s:g} s (cluster.wait_s)")
            if now - told > SAY_S:
                told = now
                say("cluster", f"{what}; the run waits for up to {wait_s:g} s (cluster.wait_s)")
            with self._lock:
                extra = next((part for part in self._parts if part.extra), None)
                if extra is not None:
                    say("instances", f"{extra.name} ends; {missing[0].name} may need its room")
                    end([extra], self._logs)
                    self._drop(extra)
            time.sleep(LOOK_S)
        return self._config

    def _lose_silent(self, nodes: Sequence[PlacedPart]) -> None:
        """Lose the parts whose actors do not answer. Ray itself may notice it much later."""
        import ray

        asked = {part: part.actor.place.remote() for part in nodes if part.place is not None}
        if asked:
            ray.wait([*asked.values()], num_returns=len(asked), timeout=10.0)
        for part, answer in asked.items():
            try:
                ray.get(answer, timeout=0)
            except ray.exceptions.RayError as error:  # also GetTimeoutError
                self._lose(part, f"is lost with its node: {_first_line(error)}")

    def _fewer(self, nodes: int) -> Config | None:
        """The config for so many trainer nodes; None if there is none, or if it does not reach the instances."""
        fewer = on_fewer_nodes(self._config, nodes)
        if fewer is None:
            return None
        placed = [(part, part.place) for part in self._parts if part.place is not None]
        return None if any(out_of_reach(part, place, fewer, self._here) for part, place in placed) else fewer

    def _leave_out(self, nodes: Sequence[PlacedPart], fewer: Config, what: str) -> None:
        """End the trainer nodes that are too many for a config."""
        with self._lock:
            there = [part for part in nodes if part.place is not None]
            out = [part for part in nodes if part not in there[: fewer.parallel.nodes - 1]]
            end([part for part in out if part.place is not None], self._logs)
            for part in out:
                kill(part)
                part.again = math.inf
        layout = fewer.parallel
        say(
            "cluster",
            f"{what}; the run goes on with parallel.nodes = {layout.nodes} and parallel.data = {layout.data} "
            "(cluster.least_nodes)",
        )


@dataclass
class Needed:
    """A part of Ray that a run needs."""

    name: str
    address: str
    """Where it listens: "host:port"."""
    responds: Callable[[], bool] = lambda: True
    """Asks it something, because what stands still may still listen. Whether it answered within LOOK_S."""
    wait_s: float = 0.0
    """Seconds for which a run goes on without it; 0 if it is gone for good."""
    silences: int = 0
    """Number of looks in a row without an answer."""
    answered: float = 0.0
    """Monotonic time of the last answer."""

    def answers(self) -> bool:
        """Whether it answers now."""
        host, port = split_address(self.address, "Ray's address")
        try:
            socket.create_connection((host, port), timeout=LOOK_S).close()
        except OSError as error:
            return error.errno in NO_FILE  # which says nothing of Ray
        return self.responds()

    def __str__(self) -> str:
        silent_s = time.monotonic() - self.answered
        return f"{self.name} ({self.address}) has not answered {self.silences} times in {silent_s:.0f} s"


class RayWatch:
    """A thread that looks whether what a run needs of Ray is there: the head, which knows all nodes, and the node of
    this machine. Without either Ray ends all of the run, or never starts anything again.

    What is silent and can come back is waited for, as Ray does, and the run goes on: its processes need no Ray to talk
    to each other. Once one of them is lost it sends SIGTERM to this process, which has one way to end from wherever it
    is, so that the trainer saves a checkpoint. The body then raises MetronomeError. A process that is ending is left
    alone.
    """

    def __init__(self, needed: Sequence[Needed], note: Callable[[Exception], None] = lambda error: None) -> None:
        """`note` gets the error before it is raised. Only the main thread may enter it."""
        self._needed = needed
        self._note = note
        self._entered = 0
        self._ends = False
        """Whether it has sent the signal."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="ray", daemon=True)
        self.lost = ""
        """What is lost; empty while nothing is."""

    @property
    def waits(self) -> bool:
        """Whether something is silent, so that Ray starts nothing."""
        return any(one.silences >= SILENCES for one in self._needed)

    def __enter__(self) -> RayWatch:
        self._entered = threading.get_ident()
        for one in self._needed:
            one.answered = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if kind is not None and self._ends:
            lost = MetronomeError(f"{self.lost}, and without it Ray runs nothing: resume the run on another cluster")
            self._note(lost)
            raise lost from None

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_S):
            for one in self._needed:
                self._look_at(one)
            silent = max(self._needed, key=lambda one: one.silences)
            if any(_is_lost(one) for one in self._needed):
                self.lost = str(silent)
                if not is_stopping():
                    self._ends = True
                    say("cluster", f"{self.lost}; the run ends")
                    signal.pthread_kill(self._entered, signal.SIGTERM)
                return

    def _look_at(self, one: Needed) -> None:
        if one.answers():
            if one.silences >= SILENCES:
                say("cluster", f"{one.name} ({one.address}) is back after {time.monotonic() - one.answered:.0f} s")
            one.silences = 0
            one.answered = time.monotonic()
            return
        one.silences += 1
        if one.silences == SILENCES and not _is_lost(one):
            say("cluster", f"{one}; the run goes on without it for up to {one.wait_s:g} s")


def _is_lost(one: Needed) -> bool:
    return one.silences >= SILENCES and time.monotonic() - one.answered >= one.wait_s


def _after(times: int) -> float:
    """Monotonic time at which something is tried again that has failed so many times before."""
    return time.monotonic() + min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(times, MOST_DOUBLINGS))


def _first_line(error: Exception) -> str:
    return clean_text(str(error)).partition("\n")[0]
