"""A complete group, packed once: the sample queue keeps it and a unit leases it as these bytes; the trainer opens it.

A sealed group has a few numbers that the launcher reads, and a body: msgpack of its columns, each over all responses
laid end to end. The digest of the body tells a damaged one from a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec
import xxhash

from engine.errors import TransferError
from engine.types import BatchScores, Group, Prompt, Response, Score
from engine.wire.codec import Decode, PackedResponse, open_ids, open_logprobs, pack_ids, pack_response


class GroupColumns(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The body of a sealed group. Buffers hold the numbers of all responses, one response after the other.

    The prompt's columns are left out: only the reward reads them, and it has run already. So are the texts.
    """

    prompt: tuple[str, str, str, bytes]
    """Id, problem, answer, token ids (int32)."""
    lengths: tuple[int, ...]
    """[G] tokens of each response."""
    token_ids: bytes
    """[sum of lengths] int32."""
    logprobs: bytes
    """[sum of lengths] fp32."""
    loss_mask: bytes
    """[sum of lengths] one byte for each token."""
    versions: tuple[tuple[tuple[int, int], ...], ...]
    """[G] as of engine.types.Response; so are the next three."""
    finish_reasons: tuple[str, ...]
    seeds: tuple[int, ...]
    instances: tuple[str, ...]
    scores: tuple[Score, ...]
    """[G]."""


class SealedGroup(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A prompt with all its responses and scores as bytes."""

    step: int
    index: int
    """Position of the prompt in the step's batch, 0 … B−1."""
    tokens: int
    """Number of tokens, those of the prompt counted once."""
    lengths: tuple[int, ...]
    """[G] tokens of each response."""
    rewards: tuple[float, ...]
    """[G] values of the scores."""
    digest: bytes
    """XXH3 (128 bits) of the body."""
    body: bytes
    """msgpack of `GroupColumns`."""
    mini_batch: int = 0
    """Number of the step's update that trains it. The sample queue sets it."""


_BODY: msgspec.msgpack.Decoder[GroupColumns] = msgspec.msgpack.Decoder(GroupColumns)


def seal(
    step: int, index: int, prompt: Prompt, responses: Sequence[PackedResponse], scores: Sequence[Score]
) -> SealedGroup:
    """Pack a complete group. Lone surrogates (half a character) in its texts become "?", because UTF-8 has none."""
    lengths = tuple(response.length for response in responses)
    columns = GroupColumns(
        prompt=(
            prompt.id,
            _without_surrogates(prompt.problem),
            _without_surrogates(prompt.answer),
            pack_ids(prompt.token_ids),
        ),
        lengths=lengths,
        token_ids=b"".join(response.token_ids for response in responses),
        logprobs=b"".join(response.logprobs for response in responses),
        loss_mask=b"".join(response.loss_mask for response in responses),
        versions=tuple(response.versions for response in responses),
        finish_reasons=tuple(response.finish_reason for response in responses),
        seeds=tuple(response.seed for response in responses),
        instances=tuple(response.instance for response in responses),
        scores=tuple(Score(score.value, score.status, _without_surrogates(score.detail)) for score in scores),
    )
    body = msgspec.msgpack.encode(columns)
    return SealedGroup(
        step=step,
        index=index,
        tokens=len(prompt.token_ids) + sum(lengths),
        lengths=lengths,
        rewards=tuple(score.value for score in scores),
        digest=xxhash.xxh3_128_digest(body),
        body=body,
    )


def seal_group(group: Group) -> SealedGroup:
    """Pack a group of opened responses. Its batch's scores are not part of it."""
    return seal(
        step=group.step,
        index=group.index,
        prompt=group.prompt,
        responses=tuple(map(pack_response, group.responses)),
        scores=group.scores,
    )


def is_whole(sealed: SealedGroup) -> bool:
    """Whether the body is the one that was sealed."""
    return xxhash.xxh3_128_digest(sealed.body) == sealed.digest


def open_group(sealed: SealedGroup, batch: BatchScores | None = None, decode: Decode | None = None) -> Group:
    """The inverse of `seal`, without the prompt's columns; texts are those of `decode`, else empty.

    `batch`: the scores of the step's whole batch, where the advantages depend on them. Raises TransferError if the body
    is not the one that was sealed.
    """
    if not is_whole(sealed):
        raise TransferError(
            f"step {sealed.step}, group {sealed.index}: {len(sealed.body)} bytes that are not those that the launcher "
            "has sealed (their digest is another one); a part of this machine's memory or network is faulty"
        )
    columns = _BODY.decode(sealed.body)
    identity, problem, answer, token_ids = columns.prompt
    bounds = list(pairwise(accumulate(columns.lengths, initial=0)))
    ids = open_ids(columns.token_ids)
    logprobs = open_logprobs(columns.logprobs)
    mask = tuple(map(bool, columns.loss_mask))
    responses = tuple(
        Response(
            token_ids=ids[first:end],
            logprobs=logprobs[first:end],
            versions=columns.versions[number],
            loss_mask=mask[first:end],
            finish_reason=columns.finish_reasons[number],
            text=decode(ids[first:end]) if decode is not None else "",
            seed=columns.seeds[number],
            instance=columns.instances[number],
        )
        for number, (first, end) in enumerate(bounds)
    )
    return Group(
        step=sealed.step,
        index=sealed.index,
        prompt=Prompt(identity, problem, answer, open_ids(token_ids)),
        responses=responses,
        scores=columns.scores,
        batch=batch,
        mini_batch=sealed.mini_batch,
    )


def batch_scores(groups: Sequence[SealedGroup]) -> BatchScores:
    """The scores of all groups of a step, which may be given in any order."""
    ordered = sorted(groups, key=lambda group: group.index)
    return BatchScores(tuple(group.rewards for group in ordered), tuple(group.lengths for group in ordered))


def _without_surrogates(text: str) -> str:
    """Return the text with "?" for each lone surrogate (half a character), which UTF-8 can't encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
