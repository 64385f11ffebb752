"""Whether a training has diverged, by the figures of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.run.checkpoint_files import all_complete, step_of
from engine.run.files import read_lines
from engine.run.folder import RunFolder

LOST = 0.1
"""Share of the best reward so far, below which a step's reward counts as lost."""
GONE = 1e-3
"""Share of the first step's entropy, below which a step's entropy counts as collapsed."""
FAR_KL = 1.0
"""KL divergence from the reference, per token, above which a policy is far from it."""
FAR_RATIO = 1e3
"""old_ratio_max above which an update has destroyed the policy before it. It seldom exceeds 10."""
FAR_GAP = 0.1
"""max_ratio_gap of fp32 weights above which their numerics break down."""


class Divergence:
    """Watches a run's steps, in their order. Its training has diverged at the first step whose loss or gradient is no
    number, or whose reward is lost while another figure breaks down as well."""

    def __init__(self) -> None:
        self.step: int | None = None
        """The first step that shows it: its weights are of no use any more. None: there is none."""
        self.rate = 0.0
        """The largest learning rate before it."""
        self._best = 0.0
        self._entropy = 0.0
        self._text = ""

    def add(self, row: Mapping[str, Any]) -> bool:
        """Take a line of steps.jsonl; returns whether this one is the first that shows it."""
        if self.step is not None:
            return False
        reward = _figure(row, "reward_mean")
        entropy = _figure(row, "entropy")
        self.rate = max(self.rate, _figure(row, "learning_rate"))
        self._entropy = self._entropy or entropy
        wrong = [f"{name} {row[name]}" for name in ("loss", "grad_norm") if not math.isfinite(_figure(row, name))]
        if wrong or reward < LOST * self._best:
            far = (("kl", FAR_KL), ("old_ratio_max", FAR_RATIO), ("max_ratio_gap", FAR_GAP))
            signs = [f"{name} {row[name]:.3g}" for name, limit in far if _figure(row, name) > limit]
            if entropy < GONE * self._entropy:
                signs.append(f"entropy {self._entropy:.3g} → {entropy:.3g}")
            if wrong or signs:
                self.step = row["step"]
                self._text = ", ".join([*wrong, f"reward {self._best:.3g} → {reward:.3g}", *signs])
        self._best = max(self._best, reward)
        return self.step is not None

    def describe(self) -> str:
        """What to do, and the figures; "" if it has not diverged."""
        if self.step is None:
            return ""
        return f"training diverged: lower train.learning_rate ({self.rate:g}); at step {self.step}: {self._text}"


def _figure(row: Mapping[str, Any], name: str) -> float:
    """A figure of a step, which another trainer may not have, or a torn line."""
    found = row.get(name)
    return float(found) if isinstance(found, int | float) else 0.0


def find_divergence(rows: Iterable[Mapping[str, Any]]) -> Divergence:
    """The divergence of a run with these lines of steps.jsonl."""
    found = Divergence()
    for row in rows:
        found.add(row)
    return found


def spoilt_checkpoints(folder: RunFolder) -> list[Path]:
    """The complete checkpoints of a run with weights of which it has diverged, oldest first."""
    step = find_divergence(read_lines(folder.steps)).step
    return [one for one in all_complete(folder.checkpoints) if step is not None and step_of(one) >= step]
