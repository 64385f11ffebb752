"""Rows of the table, whose columns hold their name and a number, and what a model of the table keeps."""

from collections import Counter
from dataclasses import dataclass, field

from engine.wire.columns import OWN, Row, pack_column
from engine.wire.messages import Written


def tokens_of(index):
    return 3 + 4 * index


def columns_of(names, seed=0):
    return tuple(pack_column(name, [name, seed]) for name in sorted(names))


def row_of(step, index, names=OWN, seed=0):
    tokens = tokens_of(index)
    one = (tokens,)
    return Row(step=step, index=index, tokens=tokens, lengths=one, trained=one, columns=columns_of(names, seed))


def written_of(indices, names, seed=0):
    return tuple(Written(index, columns_of(names, seed)) for index in indices)


@dataclass
class Lent:
    """What the model knows of a lease."""

    stage: str
    step: int
    indices: tuple
    given: float
    deliveries: int = 1
    state: str = "held"
    """or "over", "replaced", "forgotten"."""


@dataclass
class Passed:
    """How far a stage is in a step."""

    given: Counter = field(default_factory=Counter)
    """By index: how often it was given."""
    done: Counter = field(default_factory=Counter)
