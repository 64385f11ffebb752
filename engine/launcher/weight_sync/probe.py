"""The probe: a few fixed tokens, whose log-probabilities show which weights a model computes with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.launcher.pool.instance_client import InstanceFault
from engine.wire.rollout_messages import Complete, CompletionReply

PERTURBED_TOKENS = 8
"""Number of tokens whose output rows the self-test changes."""
TOLERANCE = {"float32": (1e-4, "largest"), "bfloat16": (0.02, "mean")}
"""By dtype of the instances' weights: the largest allowed difference between the log-probabilities of trainer and
instance, and over the tokens which difference is compared with it: the largest or the mean."""


@dataclass(frozen=True)
class Probe:
    """A fixed row of tokens, all different."""

    token_ids: tuple[int, ...]
    vocabulary: int
    dtype: str
    """Dtype of the instances' weights."""

    @property
    def perturb(self) -> list[int]:
        """Tokens whose output rows the self-test changes: the last one of the row, and some that are not in the row.

        None of them is an input of the model for any of the log-probabilities that are compared.
        """
        row = set(self.token_ids)
        others = [token for token in range(min(self.vocabulary, len(row) + PERTURBED_TOKENS)) if token not in row]
        return [self.token_ids[-1], *others[: PERTURBED_TOKENS - 1]]

    def request(self) -> Complete:
        """The request for their log-probabilities (temperature 1)."""
        return Complete(
            prompt=list(self.token_ids),
            max_tokens=1,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            prompt_logprobs=0,
        )

    def read(self, reply: CompletionReply) -> list[float]:
        """The log-probabilities in its reply, one for each token after the first. Raises InstanceFault."""
        entries = (reply.choices[0].prompt_logprobs or [])[1:]
        found = [(entry or {}).get(str(token)) for entry, token in zip(entries, self.token_ids[1:], strict=False)]
        values = [one.logprob for one in found if one is not None]
        if len(values) != len(self.token_ids) - 1:
            raise InstanceFault(
                f"its reply has prompt_logprobs of {len(values)} of the {len(self.token_ids) - 1} tokens of the probe"
            )
        return values

    def difference(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """Return the difference that `TOLERANCE` limits, the largest or the mean one; NaN if any of them is NaN."""
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(value != value for value in apart):
            return float("nan")
        return max(apart) if TOLERANCE[self.dtype][1] == "largest" else sum(apart) / len(apart)


def probe(vocabulary: int, count: int, max_context: int, dtype: str) -> Probe | None:
    """Return a probe of `count` tokens, or as many as context and vocabulary allow; None if that is fewer than two."""
    count = min(count, max_context - 1, vocabulary // 2)
    return Probe(tuple(random.Random(0).sample(range(vocabulary), count)), vocabulary, dtype) if count > 1 else None
