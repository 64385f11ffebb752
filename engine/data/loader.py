"""The order of prompts and the seeds of their responses, as pure functions of run seed and position.

Nothing here has state. A step's position follows from its number, except with dynamic sampling, where the orchestrator
counts the used prompts.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain

from engine.types import Prompt


class PromptLoader:
    """Batches of prompts, in a new random order each epoch. A batch may cross the end of an epoch, so no prompt is
    dropped."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, batch_size: int) -> None:
        if not prompts or batch_size < 1:
            raise ValueError(f"a loader needs prompts and a batch size above 0, not {len(prompts)} and {batch_size}")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._batch_size = batch_size

    def batch(self, step: int) -> list[Prompt]:
        """The `batch_size` prompts of a step (counted from 0)."""
        return [self.at(step * self._batch_size + index)[1] for index in range(self._batch_size)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and tokens of the prompts, in order. Together with the run seed it determines the tokens
        of every step's prompts."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\0{len(prompt.token_ids)}\0".encode())
            digest.update(array("i", prompt.token_ids).tobytes())
        return digest.hexdigest()

    def tokens(self) -> Iterator[int]:
        """Yield the tokens of the prompts, one prompt after another, in the order of the file."""
        return chain.from_iterable(prompt.token_ids for prompt in self._prompts)

    def epoch_of(self, step: int, index: int) -> int:
        """The epoch (counted from 0) of the prompt at `index` of the step's batch."""
        return (step * self._batch_size + index) // len(self._prompts)

    def at(self, position: int) -> tuple[int, Prompt]:
        """The prompt at a position of the endless order (counted from 0), with its epoch."""
        epoch, place = divmod(position, len(self._prompts))
        return epoch, self._prompts[_order(self._seed, epoch, len(self._prompts))[place]]


def sampling_seed(run_seed: int, epoch: int, prompt_id: str, response_index: int) -> int:
    """The seed of one response, 0 ≤ seed < 2^63. It does not depend on when or by which instance it is sampled."""
    return _hash("response", run_seed, epoch, prompt_id, response_index)


@lru_cache(maxsize=4)  # a batch covers more than a few epochs only if it is far larger than the set
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(_hash("order", seed, epoch)).shuffle(order)
    return tuple(order)


def _hash(*parts: int | str) -> int:
    """63 bits of SHA-256. Python's own hash differs between processes and versions."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
