"""Simulates the steps of a run on a simulated clock. The schedule, the table of rows and the choice of an instance are
the run's own (`engine.schedule`, `engine.orchestrator.steps`, `engine.orchestrator.pool.instance`); times come from
`Costs`. In a `SimulatedInstance` the responses in flight share its decode steps.

The simulation leaves out faults, dynamic sampling, evaluations, checkpoints and early scoring.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from engine.algorithm.losses import LOSSES
from engine.config import Config
from engine.errors import MetronomeError
from engine.model.layout import split_responses
from engine.orchestrator.pool.instance import smooth_average, soonest_instance
from engine.orchestrator.stages import stages_of
from engine.orchestrator.steps import Held, Steps
from engine.schedule import Schedule
from engine.tools.planner.costs import Costs, RowSize
from engine.tools.planner.lengths import Lengths
from engine.trainer.ranks.packing import join_windows, pack_parts
from engine.wire.columns import Column, Row
from engine.wire.messages import TRAIN


@dataclass
class SimulatedStep:
    """Times of a step in seconds. Those of the trainer are replica group 0's."""

    began: float
    seconds: float = 0.0
    sync_s: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    update_s: float = 0.0
    rollout_s: float = 0.0
    """From the first prompt that is sent to the last group in the table."""


@dataclass
class Simulated:
    """Times of the simulated steps, without the first."""

    steps: list[SimulatedStep]
    orchestrator_busy: float
    """Share of the time in which the orchestrator's core computed."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Spans in the form of a run's trace, for the timeline page."""

    def mean(self, name: str) -> float:
        """Mean of a figure of `SimulatedStep`."""
        return fmean(getattr(step, name) for step in self.steps)

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.mean("seconds")

    @property
    def bound_by(self) -> str:
        """What a step mostly waits for: "rollout", "training", "sync" or "orchestrator"."""
        if self.orchestrator_busy > 0.9:
            return "orchestrator"
        parts = {
            "rollout": self.mean("wait_s"),
            "training": self.mean("train_s"),
            "sync": self.mean("sync_s") + self.mean("update_s"),
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(eq=False)
class SampledGroup:
    """A group on its way through the simulation."""

    step: int
    index: int
    prompt: int
    """Number of prompt tokens."""
    lengths: tuple[int, ...]
    """Number of tokens of each response."""
    finished: int = 0
    """Number of finished responses."""
    began: float = 0.0
    beside: int = 0
    """Number of responses on the instance when this group began, including its own."""
    versions: set[int] = field(default_factory=set)

    @property
    def is_finished(self) -> bool:
        """Whether all its responses are."""
        return self.finished == len(self.lengths)


class SimulatedInstance:
    """Decodes all its responses one token at a time. `advance` moves its clock.

    As long as the responses in flight stay the same, n responses with a total context of S tokens make a step cost a +
    b n + c S, and S grows by n with each step. So k steps take (a + b n + c S) k + c n k² / 2 seconds.
    """

    def __init__(self, name: str, costs: Costs) -> None:
        self.name = name
        self.version = -1
        self.open = True
        """Whether it takes groups."""
        self.group_s: float | None = None
        self.slowdown = 1.0
        self.event = 0
        """Number of the last event planned for it. Earlier events are void."""
        self._costs = costs
        self._now = 0.0
        self._steps = 0.0
        """Number of decode steps made."""
        self._context = 0.0
        self._stall = 0.0
        """Seconds of prefill for which decoding waits."""
        self._active: list[tuple[float, int, int, SampledGroup]] = []
        """Heap of (decode step at which it finishes, order of arrival, number in its group, group)."""
        self._arrived = 0

    @property
    def responses(self) -> int:
        """Number of responses in flight."""
        return len(self._active)

    def begin_group(self, group: SampledGroup, now: float) -> None:
        """Start a group."""
        self.advance(now)
        group.began = now
        group.versions.add(self.version)
        self._stall += self._costs.prefill_token * group.prompt
        self._context += group.prompt * len(group.lengths)
        for number, length in enumerate(group.lengths):
            self._arrived += 1
            heapq.heappush(self._active, (self._steps + length, self._arrived, number, group))
        group.beside = self.responses

    def advance(self, now: float) -> None:
        """Move the clock to `now`."""
        elapsed = now - self._now
        self._now = now
        if not self._active or elapsed <= 0:
            return
        elapsed /= self.slowdown
        stalled = min(self._stall, elapsed)
        self._stall -= stalled
        elapsed -= stalled
        count = len(self._active)
        first = self._costs.decode_s(count, self._context)
        growth = self._costs.decode_context * count
        # the root of growth k²/2 + first k = elapsed, in a form that also holds for growth = 0
        steps = 2 * elapsed / (first + math.sqrt(first**2 + 2 * growth * elapsed)) if elapsed else 0.0
        self._steps += steps
        self._context += steps * count

    def next_finish(self) -> float | None:
        """When the next response finishes if nothing changes before; None if none will finish."""
        if not self._active or math.isinf(self.slowdown):
            return None
        count = len(self._active)
        steps = max(0.0, self._active[0][0] - self._steps)
        seconds = self._costs.decode_s(count, self._context) * steps
        seconds += self._costs.decode_context * count * steps**2 / 2
        return self._now + (self._stall + seconds) * self.slowdown

    def finish_response(self, now: float) -> tuple[SampledGroup, int]:
        """Remove the response that finishes now. Return its group and number."""
        self.advance(now)
        at, _, number, group = heapq.heappop(self._active)
        self._steps = max(self._steps, at)  # rounding may leave the count just below it
        context = group.prompt + group.lengths[number]
        self._context = max(0.0, self._context - context) if self._active else 0.0
        group.finished += 1
        group.versions.add(self.version)
        if group.is_finished:
            beside = max(group.beside, self.responses) / len(group.lengths)
            self.group_s = smooth_average(self.group_s, (now - group.began) / max(1, beside))
        return group, number


STEPS = 4
"""Number of steps that are simulated. The first is not counted, because it does not overlap with a step before it."""


def simulate_run(config: Config, costs: Costs, lengths: Lengths, seed: int = 0, steps: int = STEPS) -> Simulated:
    """Simulate the first `steps` steps of a run. Raises MetronomeError for a configuration whose steps never end, and
    for a response of a version that the schedule does not accept. Either is a bug of the simulation."""
    return _Simulation(config=config, costs=costs, lengths=lengths, seed=seed, steps=steps).run()


class _Simulation:
    def __init__(self, config: Config, costs: Costs, lengths: Lengths, seed: int, steps: int) -> None:
        rollout = config.rollout
        self._config = config
        self._costs = costs
        self._schedule = Schedule.of(config.train, rollout.partial)
        self._background = self._schedule.ahead > 0 and config.weights.staged
        self._in_turn = self._background and not self._schedule.exact and not rollout.partial
        self._last = steps
        count = config.train.prompts_per_step
        self._drawn = [lengths.draw_groups(count, rollout.group_size, seed + step) for step in range(steps)]
        self._instances = [
            SimulatedInstance(f"instance-{number}", costs)
            for number in range(rollout.instances + config.dry_run.joining)
        ]
        self._replica_groups = config.parallel.replica_groups
        self._whole_batch = config.algorithm.loss in LOSSES and LOSSES[config.algorithm.loss].scope == "batch"
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._waiting: deque[SampledGroup] = deque()
        self._table = Steps(stages_of(config, None))
        self._first_sent: dict[int, float] = {}
        self._rollout_s: dict[int, float] = {}
        self._step = 0
        self._steps: list[SimulatedStep] = []
        self._blocked: Callable[[], bool] | None = None
        """Tries the publish for which the trainer waits, whenever something has changed. Returns whether it
        succeeded.
        """
        self._swapping: Callable[[], bool] | None = None
        """Tries the swap in the background, in the same way."""
        self._to_fill: deque[int] = deque()
        """Batches that wait for the swap."""
        self._idle: dict[int, float] = {}
        """Replica groups without a window, each with the time since when it has none."""
        self._training = 0
        """Number of replica groups that compute."""
        self._held: list[dict[int, list[list[RowSize]]]] = [{} for _ in range(self._replica_groups)]
        """The windows that each replica group holds for the step's updates, by the update."""
        self._orchestrator_free = 0.0
        self._orchestrator_s = 0.0
        self._spans: list[dict[str, Any]] = []

    def run(self) -> Simulated:
        self._begin_step()
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        if self._step < self._last:
            raise MetronomeError(f"the simulation is deadlocked in step {self._step}: every process waits")
        return Simulated(self._steps[1:] or self._steps, self._orchestrator_s / self._now, self._spans)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, act))

    def _span(self, lane: str, name: str, start: float, **attributes: Any) -> None:  # noqa: ANN401
        self._spans.append({"lane": lane, "name": name, "start": start, "end": self._now, **attributes})

    # the step -------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._steps.append(SimulatedStep(self._now))
        self._blocked = self._try_publish
        self._changed()

    def _try_publish(self) -> bool:
        generated = all(step.is_generated for step in self._table.values())
        if not (self._background or not self._schedule.exact or generated) or self._swapping is not None:
            return False
        if self._background:
            self._at(self._now + self._costs.sync, self._sent)
            return True
        for instance in self._instances:
            instance.open = False
        if not self._config.rollout.partial and any(instance.responses for instance in self._instances):
            return False  # groups in flight are finished first
        self._set_pace(math.inf)
        self._at(self._now + self._costs.sync, self._published)
        return True

    def _set_pace(self, slowdown: float) -> None:
        for instance in self._instances:
            instance.advance(self._now)
            instance.slowdown = slowdown
            self._plan(instance)

    def _published(self) -> None:
        for instance in self._instances:
            instance.advance(self._now)
            self._serve(instance, self._step)
        self._set_pace(self._rollout_slowdown())
        self._span("instances", "sync", self._now - self._costs.sync, step=self._step)
        self._start_training()

    def _sent(self) -> None:
        """The weights are staged on the instances, which continue."""
        version = self._step
        before = self._table.values()
        turn = deque(self._instances)

        def swap() -> bool:
            if self._schedule.exact and not all(step.is_generated for step in before):
                return False
            while turn:
                if self._in_turn:
                    turn[0].open = False  # the others continue with the old weights
                    if turn[0].responses:
                        return False
                self._serve(turn.popleft(), version)
            return True

        self._swapping = swap
        self._start_training()

    def _serve(self, instance: SimulatedInstance, version: int) -> None:
        instance.version = version
        instance.open = True

    def _start_training(self) -> None:
        step = self._steps[-1]
        step.sync_s = self._now - step.began
        self._span("trainer-0", "sync", step.began, step=self._step)
        for due in self._schedule.due(self._step, 0, self._last):
            self._to_fill.append(due)
            self._table.begin(due, self._config.train.prompts_per_step)
        self._held = [{} for _ in range(self._replica_groups)]
        self._idle = dict.fromkeys(range(self._replica_groups), self._now)
        self._changed()

    def _changed(self) -> None:
        """Do everything that has become possible."""
        if self._swapping is not None and self._swapping():
            self._swapping = None
        if self._blocked is not None and self._blocked():
            self._blocked = None
        waits_for_swap = self._swapping is not None and (self._schedule.exact or self._config.rollout.partial)
        while self._to_fill and not waits_for_swap:
            step = self._to_fill.popleft()
            self._first_sent[step] = self._now
            self._waiting += [SampledGroup(step, index, *group) for index, group in enumerate(self._drawn[step])]
        self._hand_out()
        for replica_group in list(self._idle):
            self._lease(replica_group)

    # the instances --------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        changed = set()
        while self._waiting:
            group = self._waiting[0]
            bounded = self._config.train.mode == "bounded"
            least = self._schedule.accepted(group.step).start if bounded else 0
            serving = [one for one in self._instances if one.open and one.version >= least]
            best = soonest_instance(serving, self._config.slots, len(group.lengths))
            if best is None:
                break
            best.begin_group(self._waiting.popleft(), self._now)
            changed.add(best)
        for instance in changed:
            self._plan(instance)

    def _plan(self, instance: SimulatedInstance) -> None:
        """Plan the instance's next finished response again."""
        instance.event += 1
        when = instance.next_finish()
        if when is not None:
            self._at(when, partial(self._finished, instance, instance.event))

    def _finished(self, instance: SimulatedInstance, event: int) -> None:
        if event != instance.event:
            return
        group, number = instance.finish_response(self._now)
        self._span(
            instance.name,
            "rollout",
            group.began,
            step=group.step,
            group=group.index,
            number=number,
            prompt_tokens=group.prompt,
            tokens=group.lengths[number],
            version=instance.version,
        )
        if group.is_finished:
            work = self._costs.orchestrator_token * sum(group.lengths)
            self._orchestrator_free = max(self._orchestrator_free, self._now) + work
            self._orchestrator_s += work
            self._at(self._orchestrator_free + self._costs.verify, partial(self._put, group))
            self._changed()
        else:
            self._hand_out()
        self._plan(instance)

    def _put(self, group: SampledGroup) -> None:
        accepted = self._schedule.accepted(group.step)
        if not group.versions <= set(accepted):
            raise MetronomeError(f"simulated step {group.step} has versions {sorted(group.versions)}")
        self._table.add_row(
            Row(
                step=group.step,
                index=group.index,
                tokens=group.prompt + sum(group.lengths),
                lengths=group.lengths,
                trained=group.lengths,
                columns=tuple(Column(name, b"", b"") for name in self._table.stages[TRAIN].needs),
            )
        )
        self._rollout_s[group.step] = self._now - self._first_sent[group.step]
        self._changed()

    def _rollout_slowdown(self) -> float:
        return self._costs.rollout_slowdown if self._training else 1.0

    # the trainer ----------------------------------------------------------------------------------

    def _lease(self, replica_group: int) -> None:
        if self._table.find(self._step) is None or self._table.ledger(self._step).is_over:
            return
        while window := self._table.lease_window(TRAIN, self._step, replica_group, self._config.window_tokens):
            given = self._table.given_rows(window)
            rows = self._rows(given)
            if given[0].mini_batch or self._whole_batch:
                self._held[replica_group].setdefault(given[0].mini_batch, []).append(rows)
                self._table.acknowledge_lease(window.number)
                continue
            seconds = self._costs.window_s(rows, self._config.parallel.pipeline)
            if replica_group == 0:
                self._steps[-1].wait_s += self._now - self._idle[replica_group]
            self._span(f"trainer-{replica_group}", "wait", self._idle.pop(replica_group), step=self._step)
            if any(instance.responses for instance in self._instances):
                seconds *= self._costs.train_slowdown
            self._compute(1)
            self._at(
                self._now + seconds, partial(self._trained, replica_group, window=window, began=self._now, rows=rows)
            )
            return
        if self._table.ledger(self._step).is_over:
            self._end_step()

    def _rows(self, window: Sequence[Row]) -> list[RowSize]:
        """The micro-batches of the replica of a replica group that computes most, built like those of
        `Packing.rows`."""
        config = self._config
        budget = config.train.micro_batch_tokens
        shared = config.attention.shared_prompt
        parts = []
        for group in window:
            lengths = group.lengths
            prompt = group.tokens - sum(lengths)
            for indices in split_responses(prompt, lengths, budget, shared):
                tokens = sum(lengths[i] for i in indices) + prompt * (1 if shared else len(indices))
                squares = float(sum((prompt + lengths[i]) ** 2 for i in indices))
                parts.append(SimpleNamespace(size=tokens, squares=squares))
        rows = [
            RowSize(sum(part.size for part in packed), sum(part.squares for part in packed))
            for packed in pack_parts(parts, budget)
        ]
        return rows[:: config.parallel.lockstep]

    def _compute(self, change: int) -> None:
        """Change the number of computing replica groups by `change`."""
        before = self._rollout_slowdown()
        self._training += change
        if self._rollout_slowdown() != before:
            self._set_pace(self._rollout_slowdown())

    def _trained(self, replica_group: int, window: Held, began: float, rows: Sequence[RowSize]) -> None:
        self._table.acknowledge_lease(window.number)
        self._span(
            f"trainer-{replica_group}",
            "train",
            began,
            step=self._step,
            groups=list(window.indices),
            computed_tokens=sum(row.tokens for row in rows),
            micro_batches=len(rows),
        )
        if replica_group == 0:
            self._steps[-1].train_s += self._now - began
        self._compute(-1)
        self._idle[replica_group] = self._now
        if self._table.ledger(self._step).is_over:
            self._end_step()
        else:
            self._lease(replica_group)

    def _end_step(self) -> None:
        step = self._steps[-1]
        if 0 in self._idle:
            step.wait_s += self._now - self._idle[0]
        self._idle = {}
        held = list(map(self._held_s, self._held))
        step.train_s += held[0]
        updates = self._costs.update * self._config.train.updates
        step.update_s = updates
        self._at(self._now + max(held) + updates + self._costs.overhead, self._updated)

    def _held_s(self, held: Mapping[int, list[list[RowSize]]]) -> float:
        """Seconds of the schedules that train what a replica group holds."""
        joined = [rows for windows in held.values() for rows in join_windows(windows, self._config.most_together)]
        return sum(self._costs.window_s(rows, self._config.parallel.pipeline) for rows in joined)

    def _updated(self) -> None:
        step = self._steps[-1]
        step.seconds = self._now - step.began
        step.rollout_s = self._rollout_s[self._step]
        self._span("trainer-0", "update", self._now - step.update_s, step=self._step)
        self._table.end(self._step)
        self._step += 1
        if self._step < self._last:
            self._begin_step()
