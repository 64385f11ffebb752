"""The probe: a few fixed tokens, whose log-probabilities show which weights a model computes with.

Two correct engines differ by rounding. The size of the difference depends on the model, the engines and the dtype: in
bf16 the mean over tokens of text is 0.03 to 0.1 for trained models. So it is measured where both certainly have the
same weights: those that instances are started from, which the trainer publishes as version 0. A multiple of the
measured difference is allowed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.orchestrator.pool.instance_client import InstanceFault
from engine.wire.rollout_messages import Complete, CompletionReply

PERTURBED_TOKENS = 8
"""Number of tokens whose output rows the self-test changes."""
LEAST = {"float32": 1e-4, "bfloat16": 0.02}
"""By `Config.compared_dtype`: a difference between trainer and instance that is always allowed."""
MOST = {"float32": 0.01, "bfloat16": 0.3}
"""A difference that is never allowed, because rounding can't explain it."""
MULTIPLE = 3
"""Multiple of the measured difference that is allowed."""
UNMEASURED = {"float32": LEAST["float32"], "bfloat16": MOST["bfloat16"]}
"""The largest difference that is allowed if none was measured."""


@dataclass(frozen=True)
class Probe:
    """A fixed row of tokens. The last token occurs only once in it."""

    token_ids: tuple[int, ...]
    vocabulary: int
    dtype: str
    """The coarser dtype of trainer and instances (`Config.compared_dtype`)."""
    recorded: float = 0.0
    """The difference that was measured before the run was resumed; 0: none."""

    @property
    def which(self) -> str:
        """Which difference is limited: the "largest" over the tokens in fp32, the "mean" in bf16."""
        return "largest" if self.dtype == "float32" else "mean"

    @property
    def perturb(self) -> list[int]:
        """Tokens whose output rows the self-test changes: the last one of the row, and some that are not in the row.

        None of them is an input of the model for any of the log-probabilities that are compared.
        """
        row = set(self.token_ids)
        others = [token for token in range(min(self.vocabulary, len(row) + PERTURBED_TOKENS)) if token not in row]
        return [self.token_ids[-1], *others[: PERTURBED_TOKENS - 1]]

    def request(self) -> Complete:
        """Return the request for the log-probabilities of the tokens (temperature 1)."""
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
        """Return the log-probabilities in the reply, one for each token after the first. Raises InstanceFault."""
        entries = (reply.choices[0].prompt_logprobs or [])[1:]
        found = [(entry or {}).get(str(token)) for entry, token in zip(entries, self.token_ids[1:], strict=False)]
        values = [one.logprob for one in found if one is not None]
        if len(values) != len(self.token_ids) - 1:
            raise InstanceFault(
                f"its reply has prompt_logprobs of {len(values)} of the {len(self.token_ids) - 1} tokens of the probe"
            )
        return values

    def difference(self, ours: Sequence[float], theirs: Sequence[float]) -> float:
        """Return the difference that is limited, the largest or the mean; NaN if any value is NaN."""
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        if any(value != value for value in apart):
            return float("nan")
        return max(apart) if self.which == "largest" else sum(apart) / len(apart)

    def limit(self, noise: float | None) -> float:
        """Return the largest difference that is allowed. `noise`: the measured difference; None if there is none. A
        measured difference above MOST is ignored, since the weights were not the same."""
        if noise is None or not noise <= MOST[self.dtype]:
            allowed = max(MULTIPLE * self.recorded, UNMEASURED[self.dtype])
        else:
            allowed = max(MULTIPLE * noise, LEAST[self.dtype])
        return min(allowed, MOST[self.dtype])


def make_probe(
    vocabulary: int, count: int, max_context: int, dtype: str, text: Iterable[int] = (), recorded: float = 0.0
) -> Probe | None:
    """Return a probe of `count` tokens, or as many as context and vocabulary allow; None if that is fewer than two.

    The probe begins with the tokens of `text`. If these are too few, random tokens follow, each of which occurs once.
    The last token of the probe occurs nowhere else in it. `recorded`: as in Probe.
    """
    count = min(count, max_context - 1, vocabulary // 2)
    if count < 2:
        return None
    draw = random.Random(0)
    tokens = iter(text)
    row = list(islice(tokens, count - 1))
    row += draw.sample(sorted(set(range(vocabulary)) - set(row)), count - 1 - len(row))
    last = next((token for token in tokens if token not in row), None)
    if last is None:
        last = draw.choice(sorted(set(range(vocabulary)) - set(row)))
    return Probe((*row, last), vocabulary, dtype, recorded)
