"""Rules of control: pause, abort, resume, disconnected clients."""

from __future__ import annotations

import asyncio

from engine.tools.conformance.rules import demand, rule
from engine.tools.conformance.tried_engine import TriedEngine
from engine.wire.rollout_messages import CompletionReply, Pause, Resume

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
