"""Watches steps.jsonl while a run is disturbed: when each step was finished first, and how often again."""

import threading
import time
from collections import Counter

from tasks.tracking.mirror import NewLines

LOOK_S = 0.1


class Progress:
    """The moments (time.monotonic) at which steps were finished."""

    def __init__(self, path):
        """`path`: of steps.jsonl, which may not be there yet."""
        self.first = {}
        """By step: when it was finished the first time."""
        self.seen = Counter()
        self._lines = NewLines(path)
        self._lines.read()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join(10)

    def _watch(self):
        while not self._ended.wait(LOOK_S):
            self.look()

    def look(self):
        """Note what is new."""
        for row in self._lines.read():
            self.first.setdefault(row["step"], time.monotonic())
            self.seen[row["step"]] += 1

    @property
    def newest(self):
        """The highest step that was ever finished; −1 before the first."""
        return max(list(self.first), default=-1)

    @property
    def finished(self):
        """How many steps were finished so far; one that was trained again counts again."""
        return self.seen.total()

    @property
    def wasted(self):
        """Steps that were trained again."""
        return self.seen.total() - len(self.seen)

    def recoveries(self, faults, end, ordinary_s):
        """Seconds from each fault (moments, ascending) until the run trained again.

        That is the end of the pause between two new steps which takes most of the time from this fault to the next, or
        to `end`. Where no pause takes more than `ordinary_s` of it, the fault disturbed nothing: the next step counts.
        """
        times = sorted(self.first.values())
        found = []
        for fault, until in zip(faults, [*faults[1:], end], strict=True):
            pauses = [(min(b, until) - max(a, fault), b) for a, b in zip(times, times[1:], strict=False) if b > fault]
            long = [pause for pause in pauses if pause[0] > ordinary_s]
            found.append(max(long)[1] - fault if long else pauses[0][1] - fault if pauses else float("inf"))
        return found
