"""Checks replies to /v1/completions as if an adversary had sent them, because training would use whatever is wrong."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.model.shape import Experts
from engine.wire.columns import PackedResponse
from engine.wire.rollout_messages import CompletionReply, Routes
from engine.wire.routes import problem_of_form, problem_of_routes, route_type

ROUNDING = 1e-4
"""A log-probability may exceed 0 by this much. An engine may compute it as logit − log-sum-exp in float32, whose
rounding error is smaller for logits up to 1000. Trainer and instances may also differ by this much in float32."""
VERSIONS = 2**63
"""Weight versions are less than this."""


class BrokenRule(Exception):
    """A reply breaks a rule of the protocol; the message says which."""


@dataclass(frozen=True)
class Asked:
    """What a request asked for, as far as its reply is checked against it."""

    max_tokens: int
    vocabulary: int
    stops: frozenset[int]
    """Tokens that end a response wherever they are sampled."""
    ends: frozenset[int]
    """Tokens that may end a response: `stops`, and those of the model itself."""
    experts: Experts | None = None
    """The model's experts, if those of each token were requested."""
    prompt: int = 0
    """Number of tokens of the prompt; needed only with `experts`."""


def check_reply(reply: CompletionReply, asked: Asked, seed: int | None, instance: str) -> PackedResponse:
    """Return the reply's response. Raises BrokenRule if anything is wrong with it.

    An aborted response may have any number of tokens, including none. Any other response has at least one.
    """
    choice = reply.choices[0]
    count = len(choice.token_ids)
    if len(reply.choices) > 1:
        raise BrokenRule(f"{len(reply.choices)} responses, expected one")
    if count != len(choice.logprobs.token_logprobs):
        raise BrokenRule(f"{count} tokens and {len(choice.logprobs.token_logprobs)} log-probabilities")
    if count > asked.max_tokens:
        raise BrokenRule(f"{count} tokens, at most {asked.max_tokens} were requested")
    try:
        packed_ids = _column("q", choice.token_ids)
    except OverflowError:
        raise BrokenRule(f"token {max(choice.token_ids, key=abs)}, but the vocabulary has {asked.vocabulary}") from None
    packed_logprobs = _column("d", choice.logprobs.token_logprobs)
    token_ids = np.frombuffer(packed_ids, np.int64)
    logprobs = np.frombuffer(packed_logprobs, np.float64)
    if wrong := (
        problem_of_tokens(token_ids, asked.vocabulary)
        or problem_of_logprobs(logprobs)
        or problem_of_versions(reply.weight_versions, count)
        or problem_of_end(choice.finish_reason, token_ids, asked)
        or (problem_of_reply_routes(choice.routes, asked, asked.experts, count) if asked.experts else "")
    ):
        raise BrokenRule(wrong)
    return PackedResponse(
        token_ids=token_ids.astype(np.int32).tobytes(),
        logprobs=logprobs.astype(np.float32).tobytes(),
        versions=reply.weight_versions,
        loss_mask=b"\x01" * count,
        finish_reason=choice.finish_reason,
        seed=seed,
        instance=instance,
        routes=choice.routes.data if choice.routes is not None and asked.experts else b"",
    )


def _column(kind: str, numbers: Sequence[Any]) -> array[Any]:
    """Return the numbers with 8 bytes each. They are an array already if the reply was binary."""
    return numbers if isinstance(numbers, array) else array(kind, numbers)


def problem_of_tokens(tokens: NDArray[np.int64], vocabulary: int) -> str:
    """Say which token is not in the vocabulary; "" if all are."""
    right = (tokens >= 0) & (tokens < vocabulary)
    if not right.all():
        at = int(right.argmin())
        return f"token {at} is {tokens[at]}, but the vocabulary has {vocabulary}"
    return ""


def problem_of_logprobs(logprobs: NDArray[np.float64]) -> str:
    """Say which log-probability is invalid; "" if all are finite and at most 0."""
    right = (logprobs <= ROUNDING) & (logprobs > -np.inf)  # excludes NaN
    if not right.all():
        at = int(right.argmin())
        return f"log-probability {at} is {logprobs[at]}, expected a finite number up to 0"
    return ""


def problem_of_versions(versions: Sequence[tuple[int, int]], count: int) -> str:
    """Say if not every token has a version; "" if all have. The first span begins at 0, each later one after the
    previous."""
    starts = [start for start, _ in versions]
    ascending = all(one < other for one, other in zip(starts, starts[1:], strict=False))
    whole = starts[0] == 0 and starts[-1] < count if starts else count == 0
    if not (whole and ascending and all(0 <= version < VERSIONS for _, version in versions)):
        return f"weight_versions {list(versions)!r:.200} do not name one version for each of {count} tokens"
    return ""


def problem_of_end(reason: str, tokens: NDArray[np.int64], asked: Asked) -> str:
    """Say why the finish reason does not fit the tokens; "" if it does."""
    if reason not in ("stop", "length", "abort"):
        return f"finish_reason {reason!r:.50}"
    if not len(tokens):
        return "" if reason == "abort" else f'finish_reason "{reason}" without a token'
    if reason == "stop" and tokens[-1] not in asked.ends:
        return f'finish_reason "stop", but the last token, {tokens[-1]}, is not a stop token'
    before = tokens if reason == "abort" else tokens[:-1]  # vLLM calls a stop token at the limit "length"
    if any((before == stop).any() for stop in asked.stops):
        return f'a stop token inside, and finish_reason "{reason}"'
    return ""


def problem_of_reply_routes(routes: Routes | None, asked: Asked, experts: Experts, count: int) -> str:
    """Say what is wrong with the routes of a response of `count` tokens; "" if nothing is."""
    if routes is None:
        return "no routes, although they were requested" if count else ""
    tokens = asked.prompt + count - 1 if count else 0
    wrong = problem_of_form(routes.dtype, routes.shape, tokens, experts)
    size = math.prod(routes.shape)
    if wrong or len(routes.data) != size * route_type(experts.count).itemsize:
        return wrong or f"{len(routes.data)} bytes of routes of the shape {list(routes.shape)}"
    return problem_of_routes(np.frombuffer(routes.data, route_type(experts.count)).reshape(routes.shape), experts)
