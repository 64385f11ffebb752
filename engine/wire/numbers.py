"""Numbers in a buffer that behave like a tuple and are read on demand."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, overload

Kind = Literal["i", "f", "?"]
"""IDS, REALS or FLAGS."""
IDS: Final = "i"
"""int32: token ids."""
REALS: Final = "f"
"""fp32: log-probabilities."""
FLAGS: Final = "?"
"""One byte each: masks."""


class Numbers(Sequence[Any]):
    """A read-only view of a buffer as int, float or bool.

    It equals a tuple or list of the same numbers, and can be sliced, added to a tuple and hashed like one.
    """

    __slots__ = ("view",)

    def __init__(self, buffer: bytes | memoryview, kind: Kind) -> None:
        """Raises ValueError if the buffer does not hold a whole number of values."""
        view = memoryview(buffer)
        size = struct.calcsize(kind)
        if view.nbytes % size:
            raise ValueError(f"{view.nbytes} bytes are not a whole number of {size}-byte numbers")
        self.view: memoryview[Any] = view.cast("B").cast(kind)
        """The buffer, for numpy and torch."""

    @classmethod
    def of_view(cls, view: memoryview[Any]) -> Numbers:
        """Return the numbers of a view that already has their format."""
        numbers = cls.__new__(cls)
        numbers.view = view
        return numbers

    def __len__(self) -> int:
        return len(self.view)

    @overload
    def __getitem__(self, index: int) -> Any: ...  # noqa: ANN401

    @overload
    def __getitem__(self, index: slice) -> Numbers: ...

    def __getitem__(self, index: int | slice) -> Any:
        found = self.view[index]
        return Numbers.of_view(found) if isinstance(index, slice) else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self.view.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return self.view == other.view
        if isinstance(other, tuple | list):
            return len(other) == len(self.view) and self.view.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.view.tolist()))

    def __add__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[Any]) -> tuple[Any, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self.view.tolist()))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.view.tolist(),)
