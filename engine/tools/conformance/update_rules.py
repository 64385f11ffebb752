"""Rules of weight updates: order, checksums, versions, and what is served before and after."""

from __future__ import annotations

import asyncio
import time

from engine.tools.conformance.response_rules import near
from engine.tools.conformance.rules import demand, rule
from engine.tools.conformance.tried_engine import TriedEngine
from engine.types import JsonObject
from engine.wire.rollout_messages import BeginUpdate, CompletionReply, Pause, Resume

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
        finished = _ended(tasks)
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
    new = asyncio.create_task(engine.complete())
    done, _ = await asyncio.wait([new], timeout=HELD_S)
    new.cancel()
    await asyncio.gather(new, return_exceptions=True)
    demand(not done, "it answered a new completion while it was paused")


def _ended(tasks: list[asyncio.Task[CompletionReply]]) -> list[str]:
    return [task.result().choices[0].finish_reason for task in tasks if task.done()]


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


@rule("checksum", "a tensor with a wrong checksum is refused by name, and the old weights stay")
async def checksum(engine: TriedEngine) -> str:
    """It prevents damaged weights from being served."""
    first, *_ = engine.reference.buckets(VERSION)
    before = await _seen(engine)
    await engine.begin_update()
    sums = [("0" if first["checksums"][0][0] != "0" else "1") + first["checksums"][0][1:], *first["checksums"][1:]]
    answer = await engine.ask("POST", "/update_weights", {"update_info": {**first, "checksums": sums}})
    name = first["names"][0]
    demand(answer.status in REFUSED, f"a bucket with a wrong checksum of {name} was answered {answer}")
    demand(name in answer.error, f"the refusal does not name {name}: {answer}")
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
    await _not_served(engine)
    await engine.update(infos, VERSION)
    held = await engine.version()
    demand(held == VERSION, f"GET /load says version {held} after the whole update to {VERSION}")
    return f"{len(infos) - 1} of {len(infos)} buckets were refused, all of them taken"


async def _not_served(engine: TriedEngine) -> None:
    """Demand that a completion is refused, or held until the weights are whole."""
    asked = asyncio.create_task(engine.ask("POST", "/v1/completions", engine.body()))
    await asyncio.wait([asked], timeout=HELD_S)
    seen = asked.result() if asked.done() else None
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    demand(seen is None or seen.status == 409, f"a completion with half of the weights was answered {seen}")


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
