"""The probe of an instance with rollout.deterministic: it checks whether other requests change the bits of a response.

One seeded request is answered alone, then again, then in a full batch of requests of other lengths. vLLM promises the
same bits only on some platforms, for some models, and with kernels that change from release to release. So the bits are
compared at every start.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.errors import BadInput, DeadlineError
from engine.types import JsonObject

VARIABLE = "VLLM_BATCH_INVARIANT"
"""vLLM's environment variable for batch-invariant kernels."""
COMPLETIONS = "/v1/completions"
TOKENS = 64
"""Tokens sampled for the request, if the context has room."""
PROMPT = 1024
"""Longest prompt. It is long enough to be computed in several parts and to split attention."""
IDS = 16
"""Number of different tokens in the prompts. Every vocabulary has at least this many."""
WAIT_S = 60.0
POLL_S = 0.01

Ask = Callable[[str, str, JsonObject], JsonObject]
"""Sends method, path and body to the instance and returns its reply. Raises OSError."""


def check_invariance(ask: Ask, slots: int, max_context: int, platform: str) -> None:
    """Send the same request alone, again, and in full batches; raise BadInput if the bits of its token ids or
    log-probabilities differ. `slots`: number of other requests in a full batch. `platform`: its name in the message."""
    request, others = invariance_requests(slots, max_context)
    alone = ask("POST", COMPLETIONS, request)
    again = ask("POST", COMPLETIONS, request)
    ask("POST", "/reset_prefix_cache", {})
    together, late = _in_full_batch(ask, request, others)
    for situation, reply in (
        ("when it is repeated with its prompt in the prefix cache", again),
        ("in a full batch", together),
        ("in a full batch, with its prompt in the prefix cache", late),
    ):
        if found := first_difference(alone, reply):
            raise BadInput(
                f"rollout.deterministic = true, but {platform} gives different bits for the same request {situation}: "
                f'{found}. Set rollout.deterministic = false, or use rollout.engine = "embedded", or a platform whose '
                "vLLM has batch-invariant kernels (docs/rollouts.md, Deterministic responses; on NPUs a vllm-ascend "
                "that was compiled with VLLM_BATCH_INVARIANT=1, as `make npu` does where SOC_VERSION is set)"
            )


def invariance_requests(slots: int, max_context: int) -> tuple[JsonObject, list[JsonObject]]:
    """Return the request, and as many others of different lengths as the instance has slots."""
    tokens = min(TOKENS, max_context // 2)
    longest = min(PROMPT, max_context - tokens)
    draw = random.Random(0)
    others = [
        _request(draw, draw.randint(1, longest), draw.randint(tokens // 2 + 1, 2 * tokens), seed=number + 1)
        for number in range(slots)
    ]
    return _request(draw, longest, tokens, seed=0), others


def _request(draw: random.Random, length: int, tokens: int, seed: int) -> JsonObject:
    prompt = [draw.randrange(IDS) for _ in range(length)]
    return {"prompt": prompt, "max_tokens": tokens, "seed": seed, "temperature": 1.0, "ignore_eos": True}


def _in_full_batch(ask: Ask, request: JsonObject, others: list[JsonObject]) -> tuple[JsonObject, JsonObject]:
    """Return the replies to the request when it starts together with the others, and when it arrives while they run."""
    ask("POST", "/pause?mode=wait", {})  # holds them back until all have arrived
    with ThreadPoolExecutor(len(others) + 2) as pool:
        try:
            sent = [pool.submit(ask, "POST", COMPLETIONS, body) for body in (request, *others)]
            _wait_until_held(ask, len(sent))
        finally:
            ask("POST", "/resume", {})
        late = pool.submit(ask, "POST", COMPLETIONS, request)
        replies = [one.result() for one in sent]
        return replies[0], late.result()


def _wait_until_held(ask: Ask, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while (waiting := ask("GET", "/load", {})["waiting"]) < count:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{waiting} of {count} requests of the probe are still waiting at the instance after {WAIT_S:g} s"
            )
        time.sleep(POLL_S)


def first_difference(alone: JsonObject, other: JsonObject) -> str:
    """Return the first difference between two replies to one request; "" if all their bits are equal."""
    ours = sampled_tokens(alone)
    theirs = sampled_tokens(other)
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} tokens instead of {len(ours)}"
    for number, ((token, logprob), (other_token, other_logprob)) in enumerate(zip(ours, theirs, strict=True)):
        if token != other_token:
            return f"its token {number} is {other_token} instead of {token}"
        if logprob.hex() != other_logprob.hex():
            return f"the log-probability of its token {number} is {other_logprob!r} instead of {logprob!r}"
    return ""


def sampled_tokens(reply: JsonObject) -> list[tuple[int, float]]:
    """Return each token of a reply with its log-probability."""
    choice = reply["choices"][0]
    return list(zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True))
