"""The progress of an evaluation, for the process that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.orchestrator.run_events import RunEvents


@dataclass
class EvaluationProgress:
    """Progress of an evaluation. The evaluation writes it, and another thread may read it at any time."""

    expected: int = 0
    """Number of responses; 0 until the benchmarks are encoded and the instances serve."""
    finished: int = 0
    """Number of responses that have arrived."""
    scored: int = 0
    """Number of responses that have a score."""
    score: float = 0.0
    """Sum of the scores so far."""
    whole_scores: bool = True
    """Whether each score so far is 0 or 1, so that their mean is an accuracy."""
    notices: RunEvents = field(default_factory=RunEvents)
    """Receives problems that occur during the evaluation."""

    def count_group(self, rewards: Sequence[float]) -> None:
        """Count the scores of a finished group."""
        self.scored += len(rewards)
        self.score += sum(rewards)
        self.whole_scores = self.whole_scores and all(reward in (0.0, 1.0) for reward in rewards)
        self.notices.report_due()
