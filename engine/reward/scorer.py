"""The interface of an object that scores responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from engine.types import Prompt, Response, Score
from engine.wire.columns import PackedResponse

LONGEST_NAME = 100
"""Largest number of characters of the name of a metric or a benchmark: MLflow takes 250 for both with what Metronome
adds, and refuses all figures of a request if one name is longer."""
METRIC_NAME = re.compile(rf"(?=.{{1,{LONGEST_NAME}}}$)\w[\w.\-]*(/\w[\w.\-]*)*(?<!_std)", re.ASCII)
"""Names of a score's metrics. MLflow takes them too. NAME_std is the figure with the deviation of NAME."""
METRIC_NAMES = f"letters, digits and _ - . /, at most {LONGEST_NAME}, and does not end in _std"
"""What a name has, for messages."""
LARGEST_SCORE = 1e6
"""Largest absolute value of a score. The gradient of far larger ones overflows, or drowns that of all others."""


class ResponseScorer(Protocol):
    """Scores responses. engine.orchestrator.workers.verifier_pool implements it with worker processes."""

    @property
    def per_response(self) -> bool:
        """Whether responses are scored one by one, as they arrive."""

    async def score(self, prompt: Prompt, responses: Sequence[Response | PackedResponse]) -> list[Score]:
        """Scores of the responses, in order. The text of a packed response is decoded where it is scored."""
