"""Rows and columns: the form in which a group travels from the instances to the trainer (docs/architecture.md, The
plane).

A row is a group, identified by a step and the group's index in it. A column is a named value of a row. It is packed
once, with a digest that reveals damage. Numbers stay raw buffers: `open_group` gives users' code a view that reads them
on demand.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replaced
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, overload

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.errors import BadInput, TransferError
from engine.types import BatchScores, Group, Prompt, Response, Score, is_left_out

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


# rows ---------------------------------------------------------------------------------------------

PROMPT = "prompt"
"""Column of a row's prompt: `PromptColumn`."""
RESPONSES = "responses"
"""Column of the responses' tokens: `ResponsesColumn`."""
LOGPROBS = "logprobs"
"""Column of the instances' log-probabilities of these tokens: values, [tokens] fp32."""
SCORES = "scores"
"""Column of the reward: a `Score` for each response."""
REFERENCE = "reference_logprobs"
"""Column of the reference's log-probabilities, if a separate stage computes them: values, [tokens] fp32."""
GENERATED = (PROMPT, RESPONSES, LOGPROBS)
"""Columns that the stage `generate` writes."""
OWN = (*GENERATED, SCORES)
"""Columns that the orchestrator's stages, `generate` and `reward`, write."""
ID_BYTES = 4
"""Bytes of a token id (int32)."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""


class JsonColumns(Mapping[str, Any]):
    """The further columns of a prompt from outside, as the JSON object that was sent. They are decoded in the way in
    which a verifier process decodes them, which then meets no error."""

    def __init__(self, raw: bytes) -> None:
        """Raises BadInput unless `raw` is a JSON object in UTF-8."""
        try:
            values = json.loads(raw.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"columns: expected a JSON object in UTF-8: {error}") from None
        if not isinstance(values, dict):
            raise BadInput(f"columns: expected a JSON object, got {type(values).__name__}")
        self._values: dict[str, Any] = values
        self.raw = raw

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


class Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A named value of a row, as bytes."""

    name: str
    digest: bytes
    """XXH3 (128 bits) of the body."""
    body: bytes
    """msgpack. Empty if the body is in a store outside the orchestrator."""

    @property
    def is_whole(self) -> bool:
        """Whether the body still has the bytes that were packed."""
        return xxhash.xxh3_128_digest(self.body) == self.digest


class Row(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A group in the plane: a few numbers that the table reads, and the columns."""

    step: int
    index: int
    """Position of the prompt in the step's batch, 0 … B−1."""
    tokens: int
    """Number of tokens; the prompt counts once."""
    lengths: tuple[int, ...]
    """[G] tokens of each response."""
    trained: tuple[int, ...]
    """[G] trained tokens of each response, unless its score excludes it."""
    columns: tuple[Column, ...]
    mini_batch: int = 0
    """Number of the step's update that trains it; set by the table."""
    window: int = 0
    """In prompt order: number of the step's window that it belongs to; set by the table. Windows that are given as one
    are packed each by itself."""

    def column(self, name: str) -> Column:
        """Return the column with this name. Raises KeyError if the row does not have it."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    @property
    def names(self) -> frozenset[str]:
        """Names of its columns."""
        return frozenset(column.name for column in self.columns)

    @property
    def bytes(self) -> int:
        """Total size of the column bodies."""
        return sum(len(column.body) for column in self.columns)

    def only(self, names: Iterable[str]) -> Row:
        """Return the row with only these columns."""
        wanted = frozenset(names)
        return replace(self, columns=tuple(column for column in self.columns if column.name in wanted))

    def with_columns(self, columns: Iterable[Column]) -> Row:
        """Return the row with these columns added. They replace columns of the same names."""
        new = {column.name: column for column in columns}
        return replace(self, columns=tuple({**{one.name: one for one in self.columns}, **new}.values()))


class PromptColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prompt. Its further columns in the data file are left out, because only the reward reads them."""

    id: str
    problem: str
    answer: str
    token_ids: bytes
    """int32."""


class ResponsesColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The responses of a group. Each buffer concatenates the numbers of all responses."""

    lengths: tuple[int, ...]
    """[G] tokens of each response."""
    token_ids: bytes
    """[sum of lengths] int32."""
    loss_mask: bytes
    """[sum of lengths], one byte per token."""
    versions: tuple[tuple[tuple[int, int], ...], ...]
    """[G], as in engine.types.Response; so are the next three fields."""
    finish_reasons: tuple[str, ...]
    seeds: tuple[int | None, ...]
    instances: tuple[str, ...]


NO_RESPONSES = ResponsesColumn(
    lengths=(), token_ids=b"", loss_mask=b"", versions=(), finish_reasons=(), seeds=(), instances=()
)


class ValuesColumn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array of numbers: one per response, or one per token of all responses, concatenated."""

    dtype: str
    """numpy's name: "float32", "int64", …"""
    shape: tuple[int, ...]
    data: bytes
    """In C order, little-endian."""


class PackedResponse(msgspec.Struct, frozen=True):
    """An engine.types.Response as an instance returned it: its numbers are buffers, and it has no text, which is
    decoded when it is read."""

    token_ids: bytes
    """int32."""
    logprobs: bytes
    """fp32."""
    versions: tuple[tuple[int, int], ...]
    loss_mask: bytes
    """One byte per token."""
    finish_reason: str
    seed: int | None
    instance: str
    routes: bytes = b""
    """Experts of the prompt's tokens and of the response's tokens except the last (engine.wire.routes)."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids) // ID_BYTES


_PROMPT: msgspec.msgpack.Decoder[PromptColumn] = msgspec.msgpack.Decoder(PromptColumn)
_RESPONSES: msgspec.msgpack.Decoder[ResponsesColumn] = msgspec.msgpack.Decoder(ResponsesColumn)
_SCORES: msgspec.msgpack.Decoder[tuple[Score, ...]] = msgspec.msgpack.Decoder(tuple[Score, ...])
_VALUES: msgspec.msgpack.Decoder[ValuesColumn] = msgspec.msgpack.Decoder(ValuesColumn)


# packing ------------------------------------------------------------------------------------------


def pack_column(name: str, value: Any) -> Column:  # noqa: ANN401
    """Pack a value that msgpack can encode."""
    body = msgspec.msgpack.encode(value)
    return Column(name, xxhash.xxh3_128_digest(body), body)


def pack_values(name: str, values: NDArray[Any]) -> Column:
    """Pack an array of numbers."""
    whole = np.ascontiguousarray(values)
    little = whole.astype(whole.dtype.newbyteorder("<"), copy=False)
    return pack_column(name, ValuesColumn(whole.dtype.name, whole.shape, little.tobytes()))


def pack_row(
    step: int, index: int, prompt: Prompt, responses: Sequence[PackedResponse], mask_truncated: bool = False
) -> Row:
    """Pack a group whose responses are complete: the columns of the stage `generate`. `mask_truncated`:
    algorithm.mask_truncated.

    Lone surrogates (half a character) in the prompt's texts become "?", because UTF-8 can't encode them.
    """
    lengths = tuple(response.length for response in responses)
    prompt_column = PromptColumn(
        id=prompt.id,
        problem=_without_surrogates(prompt.problem),
        answer=_without_surrogates(prompt.answer),
        token_ids=pack_ids(prompt.token_ids),
    )
    sampled = ResponsesColumn(
        lengths=lengths,
        token_ids=b"".join(response.token_ids for response in responses),
        loss_mask=b"".join(response.loss_mask for response in responses),
        versions=tuple(response.versions for response in responses),
        finish_reasons=tuple(response.finish_reason for response in responses),
        seeds=tuple(response.seed for response in responses),
        instances=tuple(response.instance for response in responses),
    )
    logprobs = ValuesColumn("float32", (sum(lengths),), b"".join(response.logprobs for response in responses))
    return Row(
        step=step,
        index=index,
        tokens=len(prompt.token_ids) + sum(lengths),
        lengths=lengths,
        trained=tuple(
            0 if is_left_out(response.finish_reason, False, mask_truncated) else response.loss_mask.count(1)
            for response in responses
        ),
        columns=(pack_column(PROMPT, prompt_column), pack_column(RESPONSES, sampled), pack_column(LOGPROBS, logprobs)),
    )


def pack_scores(scores: Sequence[Score]) -> Column:
    """Pack a group's scores: the column of the stage `reward`."""
    return pack_column(SCORES, tuple(replaced(score, detail=_without_surrogates(score.detail)) for score in scores))


def pack_group(group: Group, mask_truncated: bool = False) -> Row:
    """Pack a group of opened responses with its scores and further columns. The scores of its batch are not included.
    `mask_truncated` as in `pack_row`."""
    packed = tuple(map(pack_response, group.responses))
    row = pack_row(group.step, group.index, group.prompt, packed, mask_truncated)
    further = [pack_values(name, np.asarray(values)) for name, values in group.columns.items()]
    return row.with_columns([pack_scores(group.scores), *further])


def pack_response(response: Response) -> PackedResponse:
    """Pack a response: token ids as int32 buffers, log-probabilities as fp32 buffers. No precision is lost."""
    return PackedResponse(
        token_ids=_packed(response.token_ids, IDS),
        logprobs=_packed(response.logprobs, REALS),
        versions=response.versions,
        loss_mask=_packed(response.loss_mask, FLAGS),
        finish_reason=response.finish_reason,
        seed=response.seed,
        instance=response.instance,
    )


def _packed(numbers: Sequence[Any], kind: str) -> bytes:
    if isinstance(numbers, Numbers):
        return numbers.view.tobytes()
    return bytes(numbers) if kind == FLAGS else array(kind, numbers).tobytes()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as an int32 buffer."""
    return _packed(token_ids, IDS)


# opening ------------------------------------------------------------------------------------------


def open_prompt(row: Row) -> Prompt:
    """Return the row's prompt. Raises TransferError for damaged bytes."""
    column = _PROMPT.decode(_whole(row, PROMPT).body)
    return Prompt(column.id, column.problem, column.answer, open_ids(column.token_ids))


def open_scores(row: Row) -> tuple[Score, ...]:
    """Return the row's scores. Raises TransferError for damaged bytes."""
    return _SCORES.decode(_whole(row, SCORES).body)


def open_values(row: Row, name: str) -> NDArray[Any]:
    """Return an array of numbers, read-only. Raises TransferError for damaged bytes, ValueError for a dtype that is no
    name of numpy's, such as ">f4"."""
    column = _VALUES.decode(_whole(row, name).body)
    dtype = np.dtype(column.dtype)
    if dtype.name != column.dtype:
        raise ValueError(f"the dtype {column.dtype!r} is written {dtype.name!r}, and its values are little-endian")
    return np.frombuffer(column.data, dtype.newbyteorder("<")).reshape(column.shape)


def open_group(
    row: Row,
    batch: BatchScores | None = None,
    decode: Decode | None = None,
    reward_weights: Mapping[str, float] | None = None,
) -> Group:
    """Return a view of a row as a group. Texts come from `decode`, else they are empty. The prompt's further columns
    are left out, and numbers are read on demand.

    If the row lacks a column, the group lacks what that column holds. `batch`: the scores of the step's whole batch, if
    the advantages depend on them; `reward_weights`: by column, the weight with which it is added to the reward. Raises
    TransferError if a column's bytes are damaged.
    """
    names = row.names
    sampled = _RESPONSES.decode(_whole(row, RESPONSES).body) if RESPONSES in names else NO_RESPONSES
    logprobs = _VALUES.decode(_whole(row, LOGPROBS).body).data if LOGPROBS in names else b""
    token_ids = Numbers(sampled.token_ids, IDS)
    reals = Numbers(logprobs, REALS)
    mask = Numbers(sampled.loss_mask, FLAGS)
    responses = tuple(
        Response(
            token_ids=token_ids[first:end],
            logprobs=reals[first:end],
            versions=sampled.versions[number],
            loss_mask=mask[first:end],
            finish_reason=sampled.finish_reasons[number],
            text=decode(token_ids[first:end]) if decode is not None else "",
            seed=sampled.seeds[number],
            instance=sampled.instances[number],
        )
        for number, (first, end) in enumerate(pairwise(accumulate(sampled.lengths, initial=0)))
    )
    return Group(
        step=row.step,
        index=row.index,
        prompt=open_prompt(row) if PROMPT in names else Prompt("", "", "", ()),
        responses=responses,
        scores=_rewards(row, reward_weights or {}) if SCORES in names else (),
        batch=batch,
        mini_batch=row.mini_batch,
        window=row.window,
        columns={column.name: open_values(row, column.name) for column in row.columns if column.name not in OWN},
    )


def _rewards(row: Row, weights: Mapping[str, float]) -> tuple[Score, ...]:
    """Return the row's scores with the weighted columns added."""
    scores = open_scores(row)
    for name, weight in weights.items():
        pairs = zip(scores, open_values(row, name), strict=True)
        scores = tuple(replaced(score, value=score.value + weight * float(value)) for score, value in pairs)
    return scores


def batch_scores(rows: Sequence[Row], reward_weights: Mapping[str, float] | None = None) -> BatchScores:
    """Return the scores of all rows of a step, given in any order; `reward_weights` as in `open_group`."""
    ordered = sorted(rows, key=lambda row: row.index)
    values = tuple(
        tuple(None if score.excluded else score.value for score in _rewards(row, reward_weights or {}))
        for row in ordered
    )
    trained = tuple(
        tuple(0 if value is None else count for value, count in zip(own, row.trained, strict=True))
        for own, row in zip(values, ordered, strict=True)
    )
    return BatchScores(values, tuple(row.lengths for row in ordered), trained)


def open_response(packed: PackedResponse, decode: Decode | None = None) -> Response:
    """Return a view of a packed response. The text comes from `decode`, else it is empty."""
    token_ids = Numbers(packed.token_ids, IDS)
    return Response(
        token_ids=token_ids,
        logprobs=Numbers(packed.logprobs, REALS),
        versions=packed.versions,
        loss_mask=Numbers(packed.loss_mask, FLAGS),
        finish_reason=packed.finish_reason,
        text=decode(token_ids) if decode is not None else "",
        seed=packed.seed,
        instance=packed.instance,
    )


def open_ids(buffer: bytes) -> Numbers:
    """Return the token ids of an int32 buffer. Raises ValueError if its length is not a multiple of 4."""
    return Numbers(buffer, IDS)


def _whole(row: Row, name: str) -> Column:
    column = row.column(name)
    if not column.is_whole:
        raise TransferError(
            f"step {row.step}, group {row.index}: the {len(column.body)} bytes of its column {name!r} differ from "
            "those that were packed (their digests differ); this machine's memory or network is faulty"
        )
    return column


def _without_surrogates(text: str) -> str:
    """Return the text with "?" for each lone surrogate (half a character), which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
