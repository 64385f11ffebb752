"""What a user should see of a run while it goes on: problems, and instances that join and leave.

Each event is one line, and none is repeated endlessly. A share is reported again with its new count after ever longer
pauses, and events of one kind that come in a burst are counted.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.algorithm.alignment import RECENT
from engine.algorithm.shaping import are_equal
from engine.types import Score
from engine.wire.columns import PackedResponse

Tell = Callable[[str, str], None]
"""Takes a line: its subject ("instances", "queue", "rewards", "responses", "training"), and the text."""

FIRST_S = 10.0
"""Seconds from the first count of a share to its first line, so that the line says more than the first group."""
PAUSE_S = 30.0
"""Seconds between a share's first two lines, doubled for each further line. Also the length of a burst of events."""
LONGEST_S = 600.0
"""The longest pause between two lines of a share, in seconds."""
BURST = 5
"""Events of one kind that are reported individually within PAUSE_S. Further ones are counted."""

_CUT = "responses were cut at {} tokens (max_new_tokens) or by the context"
_EQUAL = "groups have equal scores and teach nothing (equal_groups)"
_FAULTS = {
    ("timeout", False): "scores timed out and count as 0",
    ("error", False): "scores failed, count as 0",
    ("timeout", True): "scores timed out; their responses are excluded",
    ("error", True): "scores failed; their responses are excluded",
    ("ok", True): "responses were excluded by their reward",
}
"""What is reported about a score, by its status and whether it is excluded."""


@dataclass
class _Share:
    """A count out of a total, so far."""

    count: int = 0
    of: int = 0
    told: int = 0
    """The count of the last line."""
    due: float = 0.0
    """Monotonic time of the next line."""
    pause: float = PAUSE_S
    detail: str = ""


@dataclass
class _Kind:
    """Events of one kind within PAUSE_S."""

    began: float
    told: int = 0
    more: int = 0
    last: str = ""


class RunEvents:
    """Collects events, and reports them to one listener.

    Call `report_due` regularly, and `close` at the end, all in one thread.
    """

    def __init__(self, tell: Tell = lambda stage, text: None, trained: bool = True) -> None:
        """`trained`: whether the groups are trained. In an evaluation, a group with equal scores is not a loss."""
        self._tell = tell
        self._trained = trained
        self._shares: dict[tuple[str, str], _Share] = {}
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._cosines: deque[float] | None = deque(maxlen=RECENT)
        """The last steps' |cosine|; None once the line about them was told."""

    def happened(self, stage: str, kind: str, text: str, burst: int = BURST) -> None:
        """Report an event at once, or count it if there were already `burst` of its kind within PAUSE_S. If the
        text has several lines, for example the end of a log, only the first is reported."""
        text = text.partition("\n")[0].removesuffix(" ends:")
        now = time.monotonic()
        found = self._kinds.get((stage, kind))
        if found is None or now - found.began > PAUSE_S:
            if found is not None:
                self._tell_burst(stage, found)
            found = self._kinds[stage, kind] = _Kind(now)
        if found.told < burst:
            found.told += 1
            self._tell(stage, text)
        else:
            found.more += 1
            found.last = text

    def share(self, stage: str, what: str, count: int, of: int, detail: str = "") -> None:
        """Add `count` out of `of` to a share. Its line is "3 of 512 <what>: <detail>", with the sums so far."""
        found = self._shares.setdefault((stage, what), _Share())
        found.of += of
        if count and not found.count:
            found.due = time.monotonic() + FIRST_S
        found.count += count
        found.detail = detail or found.detail

    def count_group(self, responses: Sequence[PackedResponse], scores: Sequence[Score], max_new_tokens: int) -> None:
        """Count the problems with a group's responses and their scores."""
        size = len(responses)
        cut = sum(response.finish_reason == "length" for response in responses)
        self.share("responses", _CUT.format(max_new_tokens), cut, size)
        empty = sum(response.finish_reason == "stop" and response.length <= 1 for response in responses)
        self.share("responses", "responses are empty: they end with their first token", empty, size)
        if self._trained:
            equal = are_equal([score.value for score in scores if not score.excluded])
            self.share("rewards", _EQUAL, int(equal), 1)
        for wanted, what in _FAULTS.items():
            wrong = [score.detail for score in scores if (score.status, score.excluded) == wanted]
            self.share(stage="rewards", what=what, count=len(wrong), of=size, detail=wrong[-1] if wrong else "")

    def count_steps(self, steps: Sequence[Mapping[str, Any]], groups: int, size: int, max_new_tokens: int) -> None:
        """Begin with the counts of the steps that a resumed run has (lines of steps.jsonl), of `groups` of `size`."""
        counts = {
            ("responses", _CUT.format(max_new_tokens)): ("truncated", size),
            ("rewards", _EQUAL): ("equal_groups", 1),
        }
        counts |= {("rewards", _FAULTS[name, False]): (f"reward_{name}s", size) for name in ("timeout", "error")}
        for kind, (key, each) in counts.items():
            count = sum(row[key] for row in steps)
            self._shares[kind] = _Share(count, len(steps) * groups * each, told=count)

    def add_cosine(self, step: int, cosine: float, low: float | None) -> None:
        """Count a step's cosine of consecutive gradients. Once, if the last RECENT steps' mean absolute cosine exceeds
        `low`, the upper end of the on-policy range, this is reported (GAC §3.2). `low` None: not known yet."""
        if self._cosines is None:
            return
        self._cosines.append(abs(cosine))
        if low is not None and len(self._cosines) == RECENT and (mean := statistics.fmean(self._cosines)) > low:
            self._cosines = None
            self._tell(
                "training",
                f"step {step}: the |cosine| of consecutive gradients, {mean:.3f} on average over {RECENT} steps, has "
                f"left its on-policy range (up to {low:g}; GAC §3.2)",
            )

    def report_due(self) -> None:
        """Report what is due."""
        now = time.monotonic()
        for (stage, what), share in self._shares.items():
            if share.count > share.told and now >= share.due:
                self._tell_share(stage, what, share)
                share.due = now + share.pause
                share.pause = min(2 * share.pause, LONGEST_S)
        for key, found in list(self._kinds.items()):
            if now - found.began > PAUSE_S:
                self._tell_burst(key[0], found)
                del self._kinds[key]

    def close(self) -> None:
        """Report what has not been reported yet."""
        for (stage, what), share in self._shares.items():
            if share.count > share.told:
                self._tell_share(stage, what, share)
        for (stage, _), found in self._kinds.items():
            self._tell_burst(stage, found)
        self._kinds.clear()

    def _tell_share(self, stage: str, what: str, share: _Share) -> None:
        share.told = share.count
        self._tell(stage, f"{share.count:,} of {share.of:,} {what}" + (f": {share.detail}" if share.detail else ""))

    def _tell_burst(self, stage: str, found: _Kind) -> None:
        if found.more:
            self._tell(stage, f"{found.last} (the last of {found.more} more such lines)")
            found.more = 0
