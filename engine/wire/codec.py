"""Packs groups for the way from the launcher to the trainer ranks, their numbers as raw buffers; no pickle."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from engine.types import Group, Landed, Prompt, Response, Score
from engine.wire.messages import PackedGroup, PackedLanded, PackedResponse


def pack_group(group: Group) -> PackedGroup:
    """Pack a group: token ids as int32 buffers, log-probabilities as fp32 buffers, which loses nothing."""
    prompt = group.prompt
    return PackedGroup(
        step=group.step,
        index=group.index,
        prompt=(
            prompt.id,
            _without_surrogates(prompt.problem),
            _without_surrogates(prompt.answer),
            _to_buffer("i", prompt.token_ids),
        ),
        responses=tuple(_pack_response(response) for response in group.responses),
        scores=tuple(Score(score.value, score.status, _without_surrogates(score.detail)) for score in group.scores),
        advantages=group.advantages,
        batch=group.batch,
    )


def open_group(packed: PackedGroup) -> Group:
    """The inverse of `pack_group`, except that the prompt's columns are lost, because they are not packed."""
    identity, problem, answer, token_ids = packed.prompt
    return Group(
        step=packed.step,
        index=packed.index,
        prompt=Prompt(identity, problem, answer, _from_buffer("i", token_ids)),
        responses=tuple(_open_response(response) for response in packed.responses),
        scores=packed.scores,
        batch=packed.batch,
        advantages=packed.advantages,
    )


def pack_landed(landed: Landed) -> PackedLanded:
    """Pack a response whose group is not complete yet: token ids as int32 buffers."""
    return PackedLanded(
        step=landed.step,
        group=landed.group,
        number=landed.number,
        prompt=_to_buffer("i", landed.prompt),
        token_ids=_to_buffer("i", landed.token_ids),
    )


def open_landed(packed: PackedLanded) -> Landed:
    """The inverse of `pack_landed`."""
    return Landed(
        step=packed.step,
        group=packed.group,
        number=packed.number,
        prompt=_from_buffer("i", packed.prompt),
        token_ids=_from_buffer("i", packed.token_ids),
    )


def _pack_response(response: Response) -> PackedResponse:
    return PackedResponse(
        token_ids=_to_buffer("i", response.token_ids),
        logprobs=_to_buffer("f", response.logprobs),
        versions=response.versions,
        loss_mask=bytes(response.loss_mask),
        finish_reason=response.finish_reason,
        text=_without_surrogates(response.text),
        seed=response.seed,
        instance=response.instance,
    )


def _open_response(packed: PackedResponse) -> Response:
    return Response(
        token_ids=_from_buffer("i", packed.token_ids),
        logprobs=_from_buffer("f", packed.logprobs),
        versions=packed.versions,
        loss_mask=tuple(map(bool, packed.loss_mask)),
        finish_reason=packed.finish_reason,
        text=packed.text,
        seed=packed.seed,
        instance=packed.instance,
    )


def _without_surrogates(text: str) -> str:
    """Return the text with "?" for each lone surrogate (half a character), which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _to_buffer(kind: str, values: Sequence[float]) -> bytes:
    return array(kind, values).tobytes()


def _from_buffer(kind: str, buffer: bytes) -> tuple[Any, ...]:
    return tuple(array(kind, buffer))
