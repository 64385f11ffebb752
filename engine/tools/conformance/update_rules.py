"""Rules of weight updates: order, checksums, versions, and what is served before and after."""

from __future__ import annotations

import asyncio
import time

from engine.tools.conformance.control_rules import HELD_S
from engine.tools.conformance.response_rules import near
from engine.tools.conformance.rules import demand, rule
from engine.tools.conformance.tried_engine import TriedEngine
from engine.types import JsonObject
from engine.wire.rollout_messages import BeginUpdate

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
