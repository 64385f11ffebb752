"""The reward of the acceptance runs. It gives random responses different scores, so that a step has a gradient."""

from __future__ import annotations

from engine.types import Prompt, Response


def even(prompt: Prompt, responses: list[Response]) -> list[float]:
    """Share of even token ids in each response."""
    return [sum(token % 2 == 0 for token in one.token_ids) / max(1, len(one.token_ids)) for one in responses]
