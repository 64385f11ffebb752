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

from engine.config import Config
from engine.data.prompts import EncodedPrompts, spell_columns
from engine.errors import BadInput
from engine.types import Prompt


class PromptLoader:
    """Batches of prompts, in a new random order each epoch. A batch may cross the end of an epoch, so no prompt is
    dropped.

    With `parts` the prompts come from several sets: `prompts` holds one set after another, and `parts` gives (number of
    prompts, weight) for each. An epoch then has about as many prompts as all sets together. Each set contributes in
    proportion to its weight, but at least one prompt. Each set has its own random order, which goes on from one epoch
    to the next, and a new order begins when it is used up. So all prompts of a set are used equally often, and the
    epoch that `at` returns counts the passes through the set.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, batch_size: int, parts: Sequence[tuple[int, float]] = ()
    ) -> None:
        if not prompts or batch_size < 1:
            raise ValueError(f"a loader needs prompts and a batch size above 0, not {len(prompts)} and {batch_size}")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._batch_size = batch_size
        self._parts = tuple((size, size) for size in [len(prompts)])
        if parts:
            total = sum(weight for _, weight in parts)
            self._parts = tuple((size, max(1, round(len(prompts) * weight / total))) for size, weight in parts)
        self._length = sum(used for _, used in self._parts)

    def batch(self, step: int) -> list[Prompt]:
        """The `batch_size` prompts of a step (counted from 0)."""
        return [self.at(step * self._batch_size + index)[1] for index in range(self._batch_size)]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids, tokens and columns of the prompts, in order. Together with the run seed it determines
        the tokens of every step's prompts, and what a reward reads of them."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(f"{prompt.id}\0{len(prompt.token_ids)}\0".encode())
            digest.update(array("i", prompt.token_ids).tobytes())
            digest.update(f"{spell_columns(prompt)}\0".encode())
        if len(self._parts) > 1:
            digest.update(repr(self._parts).encode())
        return digest.hexdigest()

    def tokens(self) -> Iterator[int]:
        """Yield the tokens of the prompts, one prompt after another, in the order of the file."""
        return chain.from_iterable(prompt.token_ids for prompt in self._prompts)

    def epoch_of(self, step: int, index: int) -> int:
        """The epoch (counted from 0) of the prompt at `index` of the step's batch."""
        return self.at(step * self._batch_size + index)[0]

    def at(self, position: int) -> tuple[int, Prompt]:
        """The prompt at a position of the endless order (counted from 0), with its epoch."""
        epoch, place = divmod(position, self._length)
        if len(self._parts) == 1:
            return epoch, self._prompts[_order(self._seed, epoch, self._length)[place]]
        own_epoch, index = _mixture(self._seed, epoch, self._parts)[place]
        return own_epoch, self._prompts[index]


def sampling_seed(run_seed: int, epoch: int, prompt_id: str, response_index: int) -> int:
    """The seed of one response, 0 ≤ seed < 2^63. It does not depend on when or by which instance it is sampled."""
    return _hash("response", run_seed, epoch, prompt_id, response_index)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn of a response, 0 ≤ seed < 2^63. The first turn has the response's own."""
    return _hash("turn", seed, turn) if turn else seed


def load_prompts(encoded: EncodedPrompts, config: Config) -> PromptLoader:
    """The loader of a run's prompts. Raises BadInput if a set with a weight has none."""
    sets = config.data.sets
    parts = [(encoded.parts.get(number, 0), one.weight) for number, one in enumerate(sets)]
    weighted = [(size, weight) for size, weight in parts if weight is not None]
    for (size, _), one in zip(weighted, sets, strict=False):
        if not size:
            raise BadInput(f"data.train: no prompt of {one.path} is left, or all are in the sets before it; remove it")
    return PromptLoader(encoded.prompts, config.run.seed, config.train.prompts_per_step, weighted)


@lru_cache(maxsize=4)  # a batch covers more than a few epochs only if it is far larger than the set
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(_hash("order", seed, epoch)).shuffle(order)
    return tuple(order)


@lru_cache(maxsize=4)
def _mixture(seed: int, epoch: int, parts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """(the set's own epoch, index of the prompt) for each place of an epoch. `parts`: (prompts, prompts in an epoch) of
    each set."""
    places: list[tuple[int, int]] = []
    first = 0
    for number, (size, used) in enumerate(parts):
        for own_epoch in range(epoch * used // size, -(-(epoch + 1) * used // size)):
            order = list(range(size))
            random.Random(_hash("order", seed, own_epoch, number)).shuffle(order)
            begin = max(0, epoch * used - own_epoch * size)
            places += [(own_epoch, first + index) for index in order[begin : (epoch + 1) * used - own_epoch * size]]
        first += size
    random.Random(_hash("order", seed, epoch)).shuffle(places)
    return tuple(places)


def _hash(*parts: int | str) -> int:
    """63 bits of SHA-256. Python's own hash differs between processes and versions."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
