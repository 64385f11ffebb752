"""A rollout instance of the simulation: responses in flight share its decode steps."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from engine.launcher.pool.instance import smoothed
from engine.tools.planner.costs import Costs


@dataclass(eq=False)
class SampledGroup:
    """A group on its way through the simulation."""

    step: int
    index: int
    prompt: int
    """Tokens of the prompt."""
    lengths: tuple[int, ...]
    """Tokens of each response."""
    left: int = field(init=False)
    """Responses that are not finished."""
    began: float = 0.0
    beside: int = 0
    """Groups on the instance when it began, itself included."""
    versions: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = len(self.lengths)


class SimulatedInstance:
    """Decodes all its responses a token at a time. Its clock is moved by `advance`.

    Between two changes of what is in flight, with n responses and a context of S tokens together, a step costs
    a + b n + c S, and S grows by n with each step; so k steps take (a + b n + c S) k + c n k² / 2 seconds.
    """

    def __init__(self, name: str, costs: Costs) -> None:
        self.name = name
        self.version = -1
        self.open = True
        """Whether it takes groups."""
        self.groups = 0
        """Groups in flight."""
        self.group_s: float | None = None
        self.slowdown = 1.0
        self.busy_s = 0.0
        """Seconds with responses in flight."""
        self.event = 0
        """Number of the last event that was planned for it; earlier ones are void."""
        self._costs = costs
        self._now = 0.0
        self._steps = 0.0
        """Decode steps made."""
        self._context = 0.0
        self._stall = 0.0
        """Seconds of prefill that decoding waits for."""
        self._active: list[tuple[float, int, int, SampledGroup]] = []
        """Heap of (decode step at which it is finished, order of arrival, number in its group, group)."""
        self._arrived = 0

    @property
    def active(self) -> int:
        """Responses in flight."""
        return len(self._active)

    def begin(self, group: SampledGroup, now: float) -> None:
        """Take a group in flight."""
        self.advance(now)
        self.groups += 1
        group.began = now
        group.beside = self.groups
        group.versions.add(self.version)
        self._stall += self._costs.prefill_token * group.prompt
        self._context += group.prompt * len(group.lengths)
        for number, length in enumerate(group.lengths):
            self._arrived += 1
            heapq.heappush(self._active, (self._steps + length, self._arrived, number, group))

    def advance(self, now: float) -> None:
        """Let the time until `now` pass."""
        elapsed = now - self._now
        self._now = now
        if not self._active or elapsed <= 0:
            return
        self.busy_s += elapsed
        elapsed /= self.slowdown
        stalled = min(self._stall, elapsed)
        self._stall -= stalled
        elapsed -= stalled
        count = len(self._active)
        first = self._costs.decode_s(count, self._context)
        growth = self._costs.decode_context * count
        # the root of growth k²/2 + first k = elapsed, in the form that is exact for a growth of 0
        steps = 2 * elapsed / (first + math.sqrt(first**2 + 2 * growth * elapsed)) if elapsed else 0.0
        self._steps += steps
        self._context += steps * count

    def next_finish(self) -> float | None:
        """When the next response is finished, if nothing changes before; None if none will be."""
        if not self._active or math.isinf(self.slowdown):
            return None
        count = len(self._active)
        steps = max(0.0, self._active[0][0] - self._steps)
        seconds = self._costs.decode_s(count, self._context) * steps
        seconds += self._costs.decode_context * count * steps**2 / 2
        return self._now + (self._stall + seconds) * self.slowdown

    def finish(self, now: float) -> tuple[SampledGroup, int]:
        """Take out the response that is finished now. Return its group and number; with the last, the group's room is
        free again."""
        self.advance(now)
        at, _, number, group = heapq.heappop(self._active)
        self._steps = max(self._steps, at)  # rounding may have stopped short of it
        context = group.prompt + group.lengths[number]
        self._context = max(0.0, self._context - context) if self._active else 0.0
        group.left -= 1
        group.versions.add(self.version)
        if not group.left:
            self._leave(group, now)
        return group, number

    def _leave(self, group: SampledGroup, now: float) -> None:
        self.groups -= 1
        beside = max(group.beside, self.groups + 1)
        self.group_s = smoothed(self.group_s, (now - group.began) / beside)
