"""The rules of the rollout protocol: requests and errors, responses, weight updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from engine.errors import DeadlineError, MetronomeError
from engine.orchestrator.pool import reply_check
from engine.orchestrator.pool.reply_check import Asked
from engine.orchestrator.publish.probe import UNMEASURED
from engine.tools.conformance.tried_engine import EngineAnswer, RefusedCall, TriedEngine
from engine.types import JsonObject
from engine.wire.access_token import VARIABLE, is_loopback
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL, BeginUpdate, CompletionReply, Pause, Resume


class RuleBroken(MetronomeError):
    """The engine breaks the rule; the message says what was seen."""


Check = Callable[[TriedEngine], Awaitable[str]]
"""Tries the rule and returns what it saw. Raises RuleBroken (or an error of a call) if the rule does not hold."""


@dataclass(frozen=True)
class ProtocolRule:
    """One rule of the protocol."""

    name: str
    text: str
    """The rule in a sentence."""
    check: Check
    required: bool
    """Whether every run relies on it."""


DEFINED: list[ProtocolRule] = []
"""All rules, as they are defined."""


def rule(name: str, text: str, required: bool = True) -> Callable[[Check], None]:
    """Define a check as a rule."""
    return lambda check: DEFINED.append(ProtocolRule(name, text, check, required))


def demand(holds: bool, words: str) -> None:
    """Raise RuleBroken with these words unless `holds` is true."""
    if not holds:
        raise RuleBroken(words)


# requests and errors ---------------------------------------------------------------------------

LOAD_S = 1.0
"""Seconds within which GET /load must answer, even if the engine is busy."""
BUSY = 32
"""Number of requests that keep an engine busy."""
SMALL = 2**16
TOKEN_BYTES = 16
WEIGHTS = 2**24
"""Limits of bodies in bytes (docs/protocol.md)."""
CHUNK = 2**16
EARLY_S = 1.0
"""Seconds during which an engine may refuse a body that it has not read."""
GUARDED = (
    ("POST", "/v1/completions"),
    ("GET", "/load"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/begin_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
)
"""Routes that need the token."""


@rule("health", "GET /health answers without a token, with the version of the protocol and the world size")
async def health(engine: TriedEngine) -> str:
    """The orchestrator calls it before anything else."""
    answer = await engine.ask("GET", "/health", headers={})
    found = answer.json
    demand(answer.status == 200, f"it answered {answer}")
    protocol = found.get("protocol") if isinstance(found, dict) else None
    demand(protocol == ROLLOUT_PROTOCOL, f"protocol {protocol!r}, expected {ROLLOUT_PROTOCOL}")
    size = found.get("world_size")
    demand(type(size) is int and size >= 1, f"world_size {size!r}, expected at least 1: broadcasts need it")
    return f"protocol {protocol}, world size {size}"


@rule("token", "every other route refuses a request without the token, and with a wrong one: 401")
async def token(engine: TriedEngine) -> str:
    """Without a token, an engine listens only on loopback."""
    if engine.token is None:
        host = urlsplit(engine.url).hostname or ""
        demand(_is_loopback(host), f"{VARIABLE} is not set, and {host} is not a loopback address")
        return f"{VARIABLE} is not set, which is allowed on loopback"
    for method, path in GUARDED:
        for headers in ({}, {"Authorization": f"Bearer {engine.token}x"}, {"Authorization": f"Basic {engine.token}"}):
            body = b"{}" if method == "POST" else None
            answer = await engine.ask(method, path, body, headers)
            demand(answer.status == 401, f"{method} {path} with the headers {sorted(headers)} answered {answer}")
    return f"{len(GUARDED)} routes"


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return False


@rule("errors", "a request that can't be served is refused with the right status and a message, and has no effect")
async def errors(engine: TriedEngine) -> str:
    """A wrong status would stop a run, or cause endless retries."""
    vocabulary = engine.reference.vocabulary
    before = (await engine.load()).generated_tokens
    cases: list[tuple[int, str, str, JsonObject | bytes | None]] = [
        (400, "POST", "/v1/completions", b"{"),
        (400, "POST", "/v1/completions", b"[1]"),
        (400, "POST", "/v1/completions", engine.body(prompt=[])),
        (400, "POST", "/v1/completions", engine.body(prompt=[vocabulary])),
        (400, "POST", "/v1/completions", engine.body(prompt=[-1])),
        (400, "POST", "/v1/completions", engine.body(n=2)),
        (400, "POST", "/v1/completions", engine.body(max_tokens=0)),
        (400, "POST", "/v1/completions", engine.body(temperature=-1)),
        (400, "POST", "/v1/completions", engine.body(seed=2**63)),
        (400, "POST", "/v1/completions", engine.body(never_heard_of=1)),
        (400, "POST", "/pause?mode=keep", b"{}"),
        (400, "POST", "/begin_weight_update?mode=keep", b"{}"),
        (404, "GET", "/never_heard_of", None),
        (405, "GET", "/v1/completions", None),
    ]
    answer = await engine.ask("POST", "/v1/completions", engine.body(prompt=[0] * (engine.reference.positions + 1)))
    demand(answer.status in (400, 413), f"a prompt of more tokens than the model has positions was answered {answer}")
    for status, method, path, body in cases:
        answer = await engine.ask(method, path, body)
        what = f"{method} {path} with {str(body)[:80]}"
        demand(answer.status == status, f"{what} answered {answer}, expected {status}")
        demand(bool(answer.error), f"{what} answered {answer}: no error with message, type and code")
    after = (await engine.load()).generated_tokens
    demand(after == before, f"{after - before} tokens were sampled for refused requests")
    return f"{len(cases) + 1} wrong requests"


@rule("limits", "bodies larger than the protocol's limits are refused: 413")
async def limits(engine: TriedEngine) -> str:
    """A run may be contacted by foreign clients."""
    ids = engine.reference.positions + engine.reference.vocabulary
    cases = {"/v1/completions": SMALL + TOKEN_BYTES * ids, "/pause": SMALL, "/update_weights": WEIGHTS}
    for path, limit in cases.items():
        status = await _status_of_large(engine, path, limit + 1)
        demand(status == 413, f"POST {path} with {limit + 1} bytes answered {status}, expected 413")
    return ", ".join(f"{path} {limit + 1}" for path, limit in cases.items()) + " bytes"


async def _status_of_large(engine: TriedEngine, path: str, size: int) -> int:
    """Send a body of spaces until the engine answers, and return the status. The engine may answer before it has
    received the whole body."""
    place = urlsplit(engine.url)
    lines = [f"POST {path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close", f"Content-Length: {size}"]
    lines += [f"Authorization: Bearer {engine.token}"] if engine.token is not None else []
    try:
        async with asyncio.timeout(engine.timeout_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
            writer.write("\r\n".join([*lines, "", ""]).encode())
            answer = asyncio.create_task(reader.readline())
            await asyncio.wait([answer], timeout=EARLY_S)  # an unread body would break the connection
            sending = asyncio.create_task(_send(writer, 0 if answer.done() else size))
            try:
                line = await answer
            finally:
                for task in (answer, sending):
                    task.cancel()
                await asyncio.gather(answer, sending, return_exceptions=True)
                writer.close()
    except TimeoutError:
        raise DeadlineError(f"no answer to POST {path} with {size} bytes in {engine.timeout_s:g} s") from None
    except OSError as error:
        raise RefusedCall(f"POST {path} with {size} bytes: {type(error).__name__} {error}") from None
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _send(writer: asyncio.StreamWriter, size: int) -> None:
    for sent in range(0, size, CHUNK):
        writer.write(b" " * min(CHUNK, size - sent))
        await writer.drain()


@rule("load", "GET /load gives running, waiting, generated_tokens and weight_version within a second, also when busy")
async def load(engine: TriedEngine) -> str:
    """The orchestrator considers an engine dead if its answer is slow (rollout.heartbeat_s)."""
    slowest = 0.0
    async with engine.under_way(BUSY) as tasks:
        for _ in range(3):
            started = time.monotonic()
            seen = await engine.load()
            slowest = max(slowest, time.monotonic() - started)
            demand(min(seen.running, seen.waiting, seen.generated_tokens, seen.weight_version) >= 0, f"it says {seen}")
        busy = sum(not task.done() for task in tasks)
        demand(not busy or seen.running + seen.waiting > 0, f"{busy} requests are open, but it says {seen}")
    demand(slowest <= LOAD_S, f"it took {slowest:.1f} s with {BUSY} requests, expected at most {LOAD_S:g} s")
    return f"at most {slowest * 1000:.0f} ms with {BUSY} requests"


# responses --------------------------------------------------------------------------------------

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


@rule("log-probabilities", "a response's log-probabilities are those of the model at its temperature, before top_p")
async def log_probabilities(engine: TriedEngine) -> str:
    """The engine's values are compared with those of transformers in float32."""
    largest = 0.0
    for temperature, top_p in ((1.0, 1.0), (0.7, 1.0), (0.7, 0.5)):
        reply = await sampled(engine, temperature=temperature, top_p=top_p)
        choice = reply.choices[0]
        given = choice.logprobs.token_logprobs
        wrong = reply_check.problem_of_logprobs(np.array(given, np.float64)) if given else "there are none"
        demand(not wrong, wrong)
        expected = engine.reference.logprobs(engine.reference.prompt, choice.token_ids, temperature)
        largest = max(largest, near(engine, list(given), expected, f"at temperature {temperature:g}, top_p {top_p:g}"))
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
    sampling = (sampled(engine, seed=seed, ignore_eos=False) for seed in range(GROUP))
    replies: list[CompletionReply] = await asyncio.gather(*sampling)
    for reply in replies:
        choice = reply.choices[0]
        asked = Asked(TOKENS, engine.reference.vocabulary, frozenset(), engine.reference.ends)
        wrong = reply_check.problem_of_end(choice.finish_reason, np.array(choice.token_ids, np.int64), asked)
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


# weight updates ---------------------------------------------------------------------------------

MANY = 64
"""Number of requests with which some are being sampled and, in most engines, some wait."""
HELD_S = 0.3
"""Seconds during which a paused engine must not answer a new request."""
SAMPLED = 128
"""Number of tokens of a response that takes some time."""


@rule("pause", "POST /pause?mode=wait lets running responses finish; new and waiting ones stay until POST /resume")
async def pause(engine: TriedEngine) -> str:
    """Weights may move only when nothing runs."""
    async with engine.under_way(MANY, SAMPLED) as tasks:
        await engine.call(Pause("wait"))
        load = await engine.load()
        demand(load.running == 0, f"{load.running} responses are still running after the pause was answered")
        finished = [task.result().choices[0].finish_reason for task in tasks if task.done()]
        demand("abort" not in finished, f"a pause with mode=wait ended responses: {finished}")
        await _held(engine)
        await engine.call(Resume())
        replies = await asyncio.gather(*tasks)
    reasons = {reply.choices[0].finish_reason for reply in replies}
    demand(reasons == {"length"}, f"after the resume responses ended with {sorted(reasons)}, expected length")
    return f"{len(finished)} of {MANY} responses finished before it, {MANY - len(finished)} after the resume"


@rule("abort", "POST /pause?mode=abort ends every request at once, with the tokens it has and the reason abort")
async def abort(engine: TriedEngine) -> str:
    """If rollout.partial cuts long responses, a publish does not wait for them."""
    async with engine.under_way(MANY) as tasks:
        await engine.call(Pause("abort"))
        load = await engine.load()
        demand(load.running + load.waiting == 0, f"after the pause it says {load}")
        replies: list[CompletionReply] = await asyncio.wait_for(asyncio.gather(*tasks), engine.timeout_s)
        aborted = [reply.choices[0] for reply in replies if reply.choices[0].finish_reason == "abort"]
        demand(bool(aborted), f"none of {MANY} long responses ended as abort")
        for choice in aborted:
            count = len(choice.logprobs.token_logprobs)
            demand(len(choice.token_ids) == count, f"{len(choice.token_ids)} tokens, {count} log-probabilities")
        await _held(engine)
        await engine.call(Resume())
    partial = sum(bool(choice.token_ids) for choice in aborted)
    return f"{len(aborted)} of {MANY} ended as abort, {partial} with tokens"


async def _held(engine: TriedEngine) -> None:
    """Demand that a new request gets no answer."""
    demand(await _answer_to_new(engine) is None, "it answered a new completion while it was paused")


async def _answer_to_new(engine: TriedEngine) -> EngineAnswer | None:
    """The answer to a new completion; None if it is held."""
    asked = asyncio.create_task(engine.ask("POST", "/v1/completions", engine.body()))
    await asyncio.wait([asked], timeout=HELD_S)
    seen = asked.result() if asked.done() else None
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    return seen


@rule("disconnect", "a request whose client disconnects is dropped, and its slot is free")
async def disconnect(engine: TriedEngine) -> str:
    """The orchestrator abandons requests for responses that it no longer needs."""
    length = len((await engine.complete(max_tokens=SAMPLED)).choices[0].token_ids)
    before = (await engine.load()).generated_tokens
    async with engine.under_way(MANY, SAMPLED):
        pass
    await engine.until(lambda load: load.running + load.waiting == 0, "the requests of a client that left to end")
    sampled = (await engine.load()).generated_tokens - before
    whole = MANY * length
    demand(sampled < whole / 2, f"{sampled} of {whole} tokens were sampled for a client that had disconnected")
    return f"{sampled} of {whole} tokens were sampled"


VERSION = 7
"""A version that no engine has by chance."""
MOVED = 0.01
"""Minimum change of a log-probability when weights are perturbed."""
REFUSED = (400, 409)


@rule("base-weights", "the self-test: its own weights with changed output rows move log-probabilities, and come back")
async def base_weights(engine: TriedEngine) -> str:
    """An engine that keeps a stale copy of its output layer would not notice."""
    prompt = engine.reference.prompt
    before = await engine.prompt_logprobs(prompt)
    await engine.base(engine.reference.perturb, VERSION)
    moved = max(abs(one - other) for one, other in zip(before, await engine.prompt_logprobs(prompt), strict=True))
    demand(moved > MOVED, f"log-probabilities moved by {moved:.3g}, expected more than {MOVED:g}")
    await engine.base([], 0)
    near(engine, await engine.prompt_logprobs(prompt), before, "with the weights it was started with")
    return f"moved by {moved:.2g}, and back"


@rule("weight-update", "an update by files gives the new weights, under their version, to all that is sampled after it")
async def weight_update(engine: TriedEngine) -> str:
    """Requests that arrive during the update wait for it. Nothing that the old weights computed for a prompt is
    kept.
    """
    prompt = engine.reference.prompt
    await engine.complete()  # the prompt is in the cache, if there is one
    await engine.begin_update()
    early = asyncio.create_task(engine.complete())
    try:
        await engine.load_buckets(engine.reference.buckets(VERSION))
        await asyncio.wait([early], timeout=HELD_S)
        demand(not early.done(), "it answered a completion in the middle of an update")
        probed = await engine.finish_update(VERSION, prompt)
        reply = await asyncio.wait_for(early, engine.timeout_s)
    finally:
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
    held = await engine.version()
    demand(held == VERSION, f"GET /load says version {held} after an update to {VERSION}")
    named = [version for _, version in reply.weight_versions]
    demand(set(named) <= {VERSION}, f"a response sampled after the update names the versions {named}")
    expected = engine.reference.logprobs(prompt[:1], prompt[1:], changed=True)
    apart = near(engine, await engine.prompt_logprobs(prompt), expected, f"after the update to version {VERSION}")
    near(engine, probed, expected, "of the probe in the reply to /finish_weight_update")
    return f"version {VERSION}, apart by at most {apart:.1e} from the new weights"


@rule("checksum", "a bucket with a wrong checksum is refused with this reason, and the old weights stay")
async def checksum(engine: TriedEngine) -> str:
    """It prevents damaged weights from being served."""
    first, *_ = engine.reference.buckets(VERSION)
    before = await _seen(engine)
    await engine.begin_update()
    wrong = ("0" if first["checksum"][0] != "0" else "1") + first["checksum"][1:]
    answer = await engine.ask("POST", "/update_weights", {"update_info": {**first, "checksum": wrong}})
    demand(answer.status in REFUSED, f"a bucket with a wrong checksum was answered {answer}")
    demand("checksum" in answer.error, f"the refusal does not name the checksum: {answer}")
    refusal = f"{answer.status}: {answer.error[:80]}"
    answer = await engine.ask("POST", "/resume", {})
    demand(answer.status == 200, f"POST /resume after a refused first bucket answered {answer}")
    await _same(engine, before)
    return refusal


@rule("whole-update", "an update that lacks tensors can't be finished, and no mixture of weights is served")
async def whole_update(engine: TriedEngine) -> str:
    """After a refused finish the engine serves nothing until a new update has sent every tensor."""
    infos = engine.reference.buckets(VERSION)
    demand(len(infos) > 1, "the model is too small to be sent in two buckets")
    await engine.begin_update()
    await engine.load_buckets(infos[:-1])
    finish: JsonObject = {"weight_version": VERSION}
    answer = await engine.ask("POST", "/finish_weight_update", finish)
    demand(answer.status in REFUSED, f"/finish_weight_update without the last bucket answered {answer}")
    answer = await engine.ask("POST", "/resume", {})
    demand(answer.status == 409, f"/resume with half of the weights answered {answer}, expected 409")
    seen = await _answer_to_new(engine)
    demand(seen is None or seen.status == 409, f"a completion with half of the weights was answered {seen}")
    await engine.update(infos, VERSION)
    held = await engine.version()
    demand(held == VERSION, f"GET /load says version {held} after the whole update to {VERSION}")
    return f"{len(infos) - 1} of {len(infos)} buckets were refused, all of them taken"


@rule("update-order", "the steps of an update out of order are refused, 409, and change nothing")
async def update_order(engine: TriedEngine) -> str:
    """It keeps two orchestrators, or a restarted one, from mixing two updates."""
    first, *_ = engine.reference.buckets(VERSION)
    before = await _seen(engine)
    info: JsonObject = {"update_info": first}
    finish: JsonObject = {"weight_version": VERSION}
    await _conflict(engine, "/update_weights", info, "no update")
    await _conflict(engine, "/finish_weight_update", finish, "no update")
    engine.changed = True
    await engine.call(BeginUpdate("abort"))
    await _conflict(engine, "/resume", {}, "an update under way")
    await _conflict(engine, "/finish_weight_update", finish, "no weights loaded")
    await engine.base([], before[0])
    await _same(engine, before)
    return "4 steps out of order"


async def _conflict(engine: TriedEngine, path: str, body: JsonObject, when: str) -> None:
    answer = await engine.ask("POST", path, body)
    demand(answer.status == 409, f"POST {path} with {when} answered {answer}, expected 409")


async def _seen(engine: TriedEngine) -> tuple[int, list[float]]:
    return await engine.version(), await engine.prompt_logprobs(engine.reference.prompt)


async def _same(engine: TriedEngine, before: tuple[int, list[float]]) -> None:
    """Demand the same version and weights as before."""
    version, logprobs = await _seen(engine)
    demand(version == before[0], f"GET /load says version {version} after a refused update, {before[0]} before")
    near(engine, logprobs, before[1], "after a refused update")


@rule("staged", "buckets arrive while it generates, and are loaded later (weights.staged)", required=False)
async def staged(engine: TriedEngine) -> str:
    """Needed by modes that generate across a publish."""
    prompt = engine.reference.prompt
    version = int(time.time())  # an engine may keep the staged weights of a version
    await engine.load_buckets({**info, "staged": True} for info in engine.reference.buckets(version))
    held = await engine.version()
    demand(held != version, "staged weights were named before the update")
    await engine.update([{"transport": "staged", "version": version}], version)
    expected = engine.reference.logprobs(prompt[:1], prompt[1:], changed=True)
    apart = near(engine, await engine.prompt_logprobs(prompt), expected, "after the staged update")
    return f"apart by at most {apart:.1e} from the new weights"
