"""Groups and reports as msgpack with raw buffers: what crosses between launcher and trainer ranks. No pickle."""

from __future__ import annotations

from array import array
from dataclasses import asdict
from typing import Any

import msgpack

from engine.types import BatchScores, Group, Landed, Prompt, Response, Score


def pack(message: dict[str, Any]) -> bytes:
    """A plain message (None, bool, int, float, str, bytes, lists, dicts) as bytes."""
    return msgpack.packb(message)


def unpack(data: bytes) -> dict[str, Any]:
    """The inverse of `pack`."""
    return msgpack.unpackb(data, strict_map_key=False)


def group_to_wire(group: Group) -> dict[str, Any]:
    """A group as a plain message; token ids as int32 and log-probabilities as fp32 buffers (fp32 is what they are).

    Of the prompt's columns nothing crosses: only the reward reads them, and it has run.
    """
    prompt = group.prompt
    return {
        "step": group.step,
        "index": group.index,
        "prompt": [prompt.id, prompt.problem, prompt.answer, _ints(prompt.token_ids)],
        "responses": [_response_to_wire(response) for response in group.responses],
        "scores": [asdict(score) for score in group.scores],
        "advantages": None if group.advantages is None else list(group.advantages),
        **({} if group.batch is None else {"batch": asdict(group.batch)}),
    }


def group_from_wire(wire: dict[str, Any]) -> Group:
    """The inverse of `group_to_wire`."""
    identity, problem, answer, token_ids = wire["prompt"]
    return Group(
        step=wire["step"],
        index=wire["index"],
        prompt=Prompt(identity, problem, answer, _tuple("i", token_ids)),
        responses=tuple(_response_from_wire(response) for response in wire["responses"]),
        scores=tuple(Score(**score) for score in wire["scores"]),
        batch=_batch_from_wire(wire.get("batch")),
        advantages=None if wire["advantages"] is None else tuple(wire["advantages"]),
    )


def landed_to_wire(landed: Landed) -> list[Any]:
    """A landed response as a plain message."""
    return [landed.step, landed.group, landed.number, _ints(landed.prompt), _ints(landed.token_ids)]


def landed_from_wire(wire: list[Any]) -> Landed:
    """The inverse of `landed_to_wire`."""
    step, group, number, prompt, token_ids = wire
    return Landed(step=step, group=group, number=number, prompt=_tuple("i", prompt), token_ids=_tuple("i", token_ids))


def _response_to_wire(response: Response) -> dict[str, Any]:
    return {
        "token_ids": _ints(response.token_ids),
        "logprobs": array("f", response.logprobs).tobytes(),
        "versions": [list(run) for run in response.versions],
        "loss_mask": bytes(response.loss_mask),
        "finish_reason": response.finish_reason,
        "text": response.text,
        "seed": response.seed,
        "instance": response.instance,
    }


def _response_from_wire(wire: dict[str, Any]) -> Response:
    return Response(
        token_ids=_tuple("i", wire["token_ids"]),
        logprobs=_tuple("f", wire["logprobs"]),
        versions=tuple((start, version) for start, version in wire["versions"]),
        loss_mask=tuple(bool(flag) for flag in wire["loss_mask"]),
        finish_reason=wire["finish_reason"],
        text=wire["text"],
        seed=wire["seed"],
        instance=wire["instance"],
    )


def _batch_from_wire(wire: dict[str, Any] | None) -> BatchScores | None:
    return None if wire is None else BatchScores(*(tuple(map(tuple, wire[name])) for name in ("values", "lengths")))


def _ints(values: tuple[int, ...]) -> bytes:
    return array("i", values).tobytes()


def _tuple(kind: str, buffer: bytes) -> tuple[Any, ...]:
    return tuple(array(kind, buffer))
