"""What scores responses, as those see it that need scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.types import Prompt, Response, Score


class Scorer(Protocol):
    """The verifier processes (engine.launcher.verifier_pool)."""

    @property
    def per_response(self) -> bool:
        """Whether responses are scored one by one, as they land."""

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[Score]:
        """Scores of the responses, in order."""
