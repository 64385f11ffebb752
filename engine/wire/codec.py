"""Groups as they cross between launcher and trainer ranks: numbers as raw buffers, no pickle."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from engine.types import Group, Landed, Prompt, Response, Score
from engine.wire.messages import PackedGroup, PackedLanded, PackedResponse


def pack_group(group: Group) -> PackedGroup:
    """A group with token ids as int32 and log-probabilities as fp32 buffers (fp32 is what they are)."""
    prompt = group.prompt
    return PackedGroup(
        step=group.step,
        index=group.index,
        prompt=(prompt.id, _whole(prompt.problem), _whole(prompt.answer), _buffer("i", prompt.token_ids)),
        responses=tuple(_pack_response(response) for response in group.responses),
        scores=tuple(Score(score.value, score.status, _whole(score.detail)) for score in group.scores),
        advantages=group.advantages,
        batch=group.batch,
    )


def open_group(packed: PackedGroup) -> Group:
    """The inverse of `pack_group`, but for the prompt's columns, which do not cross."""
    identity, problem, answer, token_ids = packed.prompt
    return Group(
        step=packed.step,
        index=packed.index,
        prompt=Prompt(identity, problem, answer, _numbers("i", token_ids)),
        responses=tuple(_open_response(response) for response in packed.responses),
        scores=packed.scores,
        batch=packed.batch,
        advantages=packed.advantages,
    )


def pack_landed(landed: Landed) -> PackedLanded:
    """A response whose group is not complete yet."""
    return PackedLanded(
        step=landed.step,
        group=landed.group,
        number=landed.number,
        prompt=_buffer("i", landed.prompt),
        token_ids=_buffer("i", landed.token_ids),
    )


def open_landed(packed: PackedLanded) -> Landed:
    """The inverse of `pack_landed`."""
    return Landed(
        step=packed.step,
        group=packed.group,
        number=packed.number,
        prompt=_numbers("i", packed.prompt),
        token_ids=_numbers("i", packed.token_ids),
    )


def _pack_response(response: Response) -> PackedResponse:
    return PackedResponse(
        token_ids=_buffer("i", response.token_ids),
        logprobs=_buffer("f", response.logprobs),
        versions=response.versions,
        loss_mask=bytes(response.loss_mask),
        finish_reason=response.finish_reason,
        text=_whole(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _open_response(packed: PackedResponse) -> Response:
    return Response(
        token_ids=_numbers("i", packed.token_ids),
        logprobs=_numbers("f", packed.logprobs),
        versions=packed.versions,
        loss_mask=tuple(map(bool, packed.loss_mask)),
        finish_reason=packed.finish_reason,
        text=packed.text,
        seed=packed.seed,
        instance=packed.instance,
    )


def _whole(text: str) -> str:
    """The text with "?" for half a character, which UTF-8 has no bytes for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _buffer(kind: str, values: Sequence[float]) -> bytes:
    return array(kind, values).tobytes()


def _numbers(kind: str, buffer: bytes) -> tuple[Any, ...]:
    return tuple(array(kind, buffer))
