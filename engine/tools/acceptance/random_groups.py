"""Groups of random tokens with random rewards, for measurements of the trainer alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from engine.types import Group, Prompt, Response, Score


def random_group(prompt: int, lengths: Sequence[int], vocabulary: int, seed: int = 0, step: int = 0) -> Group:
    """A prompt of `prompt` random tokens with responses of these lengths and random rewards. Its index is the seed."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    responses = tuple(
        Response(
            token_ids=tokens(length),
            logprobs=(-1.0,) * length,
            versions=((0, step),),
            loss_mask=(True,) * length,
            finish_reason="length",
            text="",
            seed=0,
            instance="",
        )
        for length in lengths
    )
    return Group(
        step=step,
        index=seed,
        prompt=Prompt(str(seed), "", "", tokens(prompt)),
        responses=responses,
        scores=tuple(Score(draw.random()) for _ in lengths),
    )
