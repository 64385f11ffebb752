"""Rules of responses: tokens, log-probabilities, versions, digest, ends, seeds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from engine.orchestrator.pool import reply_check
from engine.orchestrator.pool.reply_check import Asked
from engine.orchestrator.publish.probe import UNMEASURED
from engine.tools.conformance.rules import demand, rule
from engine.tools.conformance.tried_engine import TriedEngine
from engine.wire.rollout_messages import CompletionReply

TOKENS = 24
GROUP = 8
"""Number of simultaneous responses to one prompt, as in a run."""


async def sampled(engine: TriedEngine, **body: Any) -> CompletionReply:  # noqa: ANN401
    """Return a response of TOKENS tokens, unless `body` asks for another number. Demand that they are valid tokens."""
    reply = await engine.complete(**{"max_tokens": TOKENS, **body})
    ids = reply.choices[0].token_ids
    demand(len(reply.choices) == 1, f"{len(reply.choices)} choices, expected one")
    demand(bool(ids), "a response without tokens")
    wrong = [token for token in ids if not 0 <= token < engine.reference.vocabulary]
    demand(not wrong, f"token {wrong[:1]} is not one of the {engine.reference.vocabulary} of the vocabulary")
    return reply


@rule("tokens", "a response is one choice with token ids of the vocabulary, as many as were requested")
async def tokens(engine: TriedEngine) -> str:
    """With ignore_eos, only the limit ends a response."""
    for count in (1, TOKENS):
        ids = (await sampled(engine, max_tokens=count)).choices[0].token_ids
        demand(len(ids) == count, f"{len(ids)} tokens, {count} were requested, without an end of sequence")
    return f"{count} tokens of {engine.reference.vocabulary}"


@rule("log-probabilities", "a response's log-probabilities are those of the model at the request's temperature")
async def log_probabilities(engine: TriedEngine) -> str:
    """The engine's values are compared with those of transformers in float32."""
    largest = 0.0
    for temperature in (1.0, 0.7):
        reply = await sampled(engine, temperature=temperature)
        choice = reply.choices[0]
        given = choice.logprobs.token_logprobs
        wrong = reply_check.problem_of_logprobs(np.array(given, np.float64)) if given else "there are none"
        demand(not wrong, wrong)
        expected = engine.reference.logprobs(engine.reference.prompt, choice.token_ids, temperature)
        largest = max(largest, near(engine, list(given), expected, f"at temperature {temperature:g}"))
    return f"apart by at most {largest:.1e}"


@rule("prompt-log-probabilities", "prompt_logprobs are those of the model at temperature 1, also of a cached prompt")
async def prompt_log_probabilities(engine: TriedEngine) -> str:
    """The orchestrator uses them to compare an engine's weights with the trainer's."""
    prompt = engine.reference.prompt
    expected = engine.reference.logprobs(prompt[:1], prompt[1:])
    await engine.complete()
    apart = near(engine, await engine.prompt_logprobs(prompt), expected, "of the prompt")
    return f"{len(expected)} tokens, apart by at most {apart:.1e}"


def near(engine: TriedEngine, given: list[float], expected: list[float], what: str) -> float:
    """Return the largest difference. Demand one for each token, and that the largest, or with bfloat16 the mean, is
    within UNMEASURED."""
    demand(len(given) == len(expected), f"{len(expected)} tokens, {len(given)} log-probabilities")
    apart = [abs(one - other) for one, other in zip(given, expected, strict=True)]
    dtype = engine.reference.dtype
    limit = UNMEASURED[dtype]
    which = "largest" if dtype == "float32" else "mean"
    found = max(apart) if dtype == "float32" else sum(apart) / len(apart)
    demand(found <= limit, f"{what}: {which} difference from the model's {found:.3g}, expected at most {limit:g}")
    return max(apart)


@rule("versions", "every token has a weight version, that of GET /load")
async def versions(engine: TriedEngine) -> str:
    """On-policy training relies on it."""
    held = await engine.version()
    reply = await sampled(engine)
    wrong = reply_check.problem_of_versions(reply.weight_versions, len(reply.choices[0].token_ids))
    demand(not wrong, wrong)
    named = [version for _, version in reply.weight_versions]
    demand(named == [held], f"the response names {named}, GET /load {held}")
    return f"{list(map(list, reply.weight_versions))} for {TOKENS} tokens"


@rule("finish-reason", "a stop token ends the response and belongs to it: stop; the limit ends it: length")
async def finish_reason(engine: TriedEngine) -> str:
    """This is tried with a token that the response is known to contain."""
    whole = await sampled(engine, temperature=0)
    ids = whole.choices[0].token_ids
    demand(whole.choices[0].finish_reason == "length", f"{whole.choices[0].finish_reason!r} at the limit")
    stop = ids[len(ids) // 2]
    cut = await sampled(engine, temperature=0, stop_token_ids=[stop])
    found = cut.choices[0]
    expected = ids[: ids.index(stop) + 1]
    demand(
        (found.token_ids, found.finish_reason) == (expected, "stop"),
        f"the stop token {stop} is token {len(expected) - 1} of the response; with it there are "
        f"{len(found.token_ids)} tokens, finish_reason {found.finish_reason!r}",
    )
    return f"stop after {len(expected)} of {len(ids)} tokens"


@rule("seeds", "the same seed gives the same response, another seed another one")
async def seeds(engine: TriedEngine) -> str:
    """With rollout.deterministic, a lost response is sampled again with its seed."""
    found = [(await sampled(engine, seed=seed)).choices[0].token_ids for seed in (0, 1, 0, 2**63 - 1, -(2**63))]
    demand(found[0] == found[2], "two requests with seed 0 gave different tokens")
    demand(len(set(found)) > 1, "requests with different seeds gave the same tokens")
    return f"{len(set(found))} different responses to 4 seeds"


@rule("unseeded", "requests without a seed give different responses")
async def unseeded(engine: TriedEngine) -> str:
    """A run gives seeds only to deterministic instances, and in evaluations."""
    replies: list[CompletionReply] = await asyncio.gather(*(sampled(engine, seed=None) for _ in range(GROUP)))
    different = len({reply.choices[0].token_ids for reply in replies})
    demand(different > 1, f"all {GROUP} responses are the same, without a seed")
    return f"{different} different responses of {GROUP}"


@rule("group", "requests of a group run at the same time, and each response ends as it says")
async def group(engine: TriedEngine) -> str:
    """Samples as a run does, without ignore_eos."""
    asked = [sampled(engine, seed=seed, ignore_eos=False) for seed in range(GROUP)]
    replies: list[CompletionReply] = await asyncio.gather(*asked)
    ends = engine.reference.ends
    for reply in replies:
        choice = reply.choices[0]
        checked = Asked(TOKENS, engine.reference.vocabulary, frozenset(), ends)
        ids = np.array(choice.token_ids, np.int64)
        wrong = reply_check.problem_of_end(choice.finish_reason, ids, checked)
        demand(not wrong, wrong)
    different = len({reply.choices[0].token_ids for reply in replies})
    demand(different > 1, f"all {GROUP} responses are the same, with {GROUP} seeds")
    return f"{different} different responses of {GROUP}"


@rule("continued", "a response continues after the tokens that it has (rollout.partial)", required=False)
async def continued(engine: TriedEngine) -> str:
    """Its random numbers must not start over."""
    prompt = engine.reference.prompt
    first = (await sampled(engine)).choices[0].token_ids
    more = await sampled(engine, prompt=[*prompt, *first], continued=len(first))
    choice = more.choices[0]
    expected = engine.reference.logprobs([*prompt, *first], choice.token_ids)
    apart = near(engine, list(choice.logprobs.token_logprobs), expected, "of the continuation")
    demand(choice.token_ids != first, "the continuation repeats the tokens before it")
    return f"{len(choice.token_ids)} tokens more, apart by at most {apart:.1e}"
