"""vLLM's engine behind the HTTP routes: EngineClient computes completions, WeightSession in its workers receives
weights."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import BadInput
from engine.instance.protocol import Completion, RequestLimits
from engine.instance.refusals import NO_PROFILES, Conflict, Refusal
from engine.instance.replies import Result
from engine.model.shape import Experts, end_of_sequence_ids, read_shape
from engine.types import JsonObject
from engine.wire.routes import route_type

LEAST = -9999.0
"""vLLM's value for a log-probability of minus infinity, which JSON can't represent."""


def sampling_arguments(asked: Completion) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a completion."""
    found: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop_token_ids": sorted(asked.stop_ids),
        "ignore_eos": True,  # the ids above stop the response; vLLM has no tokenizer to know others
        "detokenize": False,
        "logprobs": 0,
    }
    if asked.seed is not None:
        found["seed"] = _request_seed(asked.seed, asked.continued)
    if asked.prompt_logprobs:
        found["prompt_logprobs"] = 0
    return found


def _request_seed(seed: int, continued: int) -> int:
    """Return the seed for vLLM, which starts a random sequence with each request. A continued response gets another
    seed, since it must not draw its first numbers again."""
    if not continued:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {continued}".encode()).digest()[:8], "big") >> 1


def read_output(output: Any, version: int, experts: Experts | None = None) -> Result:  # noqa: ANN401
    """Return the result in vLLM's RequestOutput. It lacks the prompt's log-probabilities if the request was aborted
    before they were computed. `experts`: the model's experts, if the tokens' experts are requested."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    scores = output.prompt_logprobs
    return Result(
        token_ids=tokens,
        logprobs=_logprobs(sampled.logprobs or [], tokens),
        finish_reason=sampled.finish_reason,
        version=version,
        prompt_logprobs=_logprobs(scores[1:], output.prompt_token_ids[1:]) if scores else None,
        routes=_routes(sampled.routed_experts, experts) if experts and tokens else None,
    )


def _routes(found: Any, experts: Experts) -> NDArray[Any]:  # noqa: ANN401
    """Return vLLM's [tokens, layers, experts per token] without the layers that have no experts. Raise Refusal if vLLM
    returned none."""
    if found is None:
        raise Refusal(500, "vLLM returned no experts (routed_experts), though it was started to (--routes)")
    return np.ascontiguousarray(found[:, list(experts.layers)], dtype=route_type(experts.count))


def _logprobs(entries: Any, tokens: list[int]) -> list[float]:  # noqa: ANN401
    """Return each token's log-probability from vLLM's {token: Logprob, …} for each position. NaN stays NaN."""
    return [max(entry[token].logprob, LEAST) for entry, token in zip(entries, tokens, strict=True)]


DRAIN_S = 60.0
"""Seconds that a pause waits for the replies to requests that vLLM has ended."""

PAUSE_S = 0.02
"""Seconds between two calls of WeightSession.poll, in which the engine takes other calls. A bucket that arrives within
WeightSession's WAIT_S needs none."""


class VllmBackend:
    """A Backend: vLLM's engine, its pause state, and the completions in progress.

    Weights change only while no completion is in progress, and whenever an update ends, successfully or not, the
    workers are asked for their version. So all tokens of a completion belong to the version known when it is admitted.
    """

    def __init__(self, engine: Any, routes: bool = False) -> None:  # noqa: ANN401
        """`engine`: vLLM's EngineClient; `routes`: whether it records the experts of each token."""
        config = engine.vllm_config
        self.model: str = config.model_config.model
        self.limits = RequestLimits(
            config.model_config.get_vocab_size(),
            config.model_config.max_model_len,
            end_of_sequence_ids(Path(self.model)),
            routes,
        )
        self._experts = read_shape(Path(self.model)).experts if routes else None
        self._profiles = config.profiler_config.profiler is not None
        self.world_size: int = config.parallel_config.world_size_across_dp
        self._engine = engine
        self._seats = config.scheduler_config.max_num_seqs
        self._version = 0
        """The version that the workers held after the last update. It starts with the weights from disk."""
        self._paused = False
        self._draining = 0  # pauses in progress
        self._held: set[asyncio.Future[bool]] = set()
        self._idle = asyncio.Event()  # no completion between vLLM and its reply
        self._idle.set()
        self._running = self._generated = self._prefills = self._jobs = 0
        self._updating = False
        self._mixed = False
        """Whether the workers may hold weights other than those of the version, because an update failed."""
        self._control = asyncio.Lock()
        self._numbers = itertools.count()

    # completions ----------------------------------------------------------------------------------

    async def complete(self, asked: Completion) -> Result:
        """Sample one response. Raise Conflict after a weight update that failed half-way."""
        self.check_whole()
        if not await self._wait_for_admission():
            return Result(token_ids=[], logprobs=[], finish_reason="abort", version=self._version)
        self._running += 1
        self._idle.clear()
        try:
            output = await self._generate(asked)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()
        found = read_output(output, self._version, self._experts if asked.routes else None)
        self._generated += len(found.token_ids)
        self._prefills += bool(found.token_ids) and not output.num_cached_tokens
        return found

    def check_whole(self) -> None:
        """Raise Conflict after a weight update that failed half-way."""
        if self._mixed and not self._updating:
            raise Conflict(
                "a weight update failed half-way: this instance's weights are incomplete until another update succeeds"
            )

    async def _wait_for_admission(self) -> bool:
        """Wait until the instance is not paused. Return whether the prompt may go to vLLM; False if it is aborted."""
        while self._paused:
            turn = asyncio.get_running_loop().create_future()
            self._held.add(turn)
            try:
                if not await turn:
                    return False
            finally:
                self._held.discard(turn)
        return True

    def _release_held(self, admitted: bool) -> None:
        """Release all held completions; `admitted`: whether they may go to vLLM."""
        for turn in self._held:
            if not turn.done():
                turn.set_result(admitted)

    async def _generate(self, asked: Completion) -> Any:  # noqa: ANN401
        """Return vLLM's RequestOutput. If this call is cancelled, vLLM drops the request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(**sampling_arguments(asked), output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"type": "token", "prompt_token_ids": list(asked.prompt)}
        async for output in self._engine.generate(prompt, wanted, f"metronome-{next(self._numbers)}"):
            if output.finished:
                return output
        raise Refusal(500, "vLLM ended a request without a result")

    # state ----------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Raise vLLM's EngineDeadError if the engine is dead."""
        await self._engine.check_health()

    async def load(self) -> dict[str, int]:
        """Return the figures of Backend.load."""
        running = min(self._running, self._seats)
        return {
            "running": running,
            "waiting": len(self._held) + self._running - running,
            "prefills": self._prefills,
            "generated_tokens": self._generated,
            "weight_version": self._version,
        }

    async def metrics(self) -> bytes:
        """Return vLLM's own metrics."""
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return generate_latest(get_prometheus_registry())

    async def start_profile(self) -> None:
        """Make vLLM's workers record a profile, as its `profiler_config` says."""
        if not self._profiles:
            raise BadInput(NO_PROFILES)
        await self._engine.start_profile()

    async def stop_profile(self) -> None:
        """Make vLLM's workers write the recorded profile."""
        await self._engine.stop_profile()

    async def pause(self, abort: bool) -> None:
        """Hold back new completions. Return once none is in progress."""
        self._paused = True
        self._draining += 1
        try:
            if abort:
                self._release_held(admitted=False)
            else:
                await self._idle.wait()  # outside the lock: a client that gives up waiting may pause with abort
            async with self._control:
                await self._engine.pause_generation(mode="abort" if abort else "wait")
                async with asyncio.timeout(DRAIN_S):
                    await self._idle.wait()
        except TimeoutError:
            raise Refusal(
                500, f"{self._running} completions are still under way {DRAIN_S:g} s after vLLM paused"
            ) from None
        finally:
            self._draining -= 1

    async def resume(self) -> None:
        """Admit completions again, including the held ones. Raise Conflict while responses drain, and while the weights
        are incomplete."""
        async with self._control:
            if self._draining:
                raise Conflict(f"{self._running} responses are still draining; resume when /pause has answered")
            if self._updating or self._mixed:
                raise Conflict(
                    "a weight update is unfinished; send /finish_weight_update, or, if it failed, start again"
                )
            await self._engine.resume_generation()
            self._paused = False
            self._release_held(admitted=True)

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prompts. Raise Conflict while a request uses some of them, because vLLM then refuses."""
        for pause_s in (0.0, 0.01, 0.1, 0.5):  # a finished request's prompts are freed a moment later
            await asyncio.sleep(pause_s)
            if await self._engine.reset_prefix_cache() is not False:
                return
        raise Conflict("running requests hold cached prompts; call /pause before /reset_prefix_cache")

    # weights --------------------------------------------------------------------------------------

    async def connect(self, init_info: JsonObject) -> None:
        """Join the senders' groups in every worker."""
        await self._run_job("connect", init_info)

    async def start_update(self) -> None:
        """Begin a weight update, or restart it. Raise Conflict unless paused and drained."""
        async with self._control:
            if not self._paused or self._running:
                raise Conflict(f"{self._running} responses are running, paused: {self._paused}; begin the update again")
            await self._call_workers("start")
            self._updating = True

    async def update(self, update_info: JsonObject) -> None:
        """Receive a bucket into the model or, if `staged`, into host memory while generation continues."""
        if update_info.get("staged"):
            await self._call_workers("stage", update_info)
        else:
            await self._update_step(lambda: self._run_job("receive", update_info))

    async def finish_update(self, version: int) -> int:
        """End the update in every worker and set the version of its weights. Return the workers' version."""
        await self._update_step(lambda: self._finish(version))
        return self._version

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Return vLLM's log-probabilities of a prompt. Other completions stay held back until `resume`."""
        probe = Completion(prompt=token_ids, max_tokens=1, prompt_logprobs=True)
        async with self._control:
            await self._engine.resume_generation()
            output = await self._generate(probe)
        return read_output(output, self._version).prompt_logprobs or []

    async def _finish(self, version: int) -> None:
        await self._call_workers("finish", version)
        self._version = await self._read_version()
        self._updating = self._mixed = False

    async def _update_step(self, step: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Carry out a step of the update. Raise Conflict if no update is in progress.

        A refused step ends the update in all workers, including those that did not refuse it. The workers are then
        asked for their state, because some may have ended the update with its new version.
        """
        async with self._control:
            if not self._updating:
                raise Conflict("no weight update was started; send /begin_weight_update first")
            try:
                await step()
            except Refusal:
                self._updating = False
                self._mixed = True  # also if this is cancelled
                await self._call_workers("abort")
                states = await self._call_workers("state")
                versions = {state["weight_version"] for state in states}
                self._mixed = len(versions) > 1 or any(state["damaged"] for state in states)
                if self._mixed:
                    self._release_held(admitted=False)
                else:
                    self._version = versions.pop()
                raise

    async def _run_job(self, kind: str, info: JsonObject) -> None:
        """Call WeightSession.begin and wait until the job ends. The engine accepts other calls in the meantime."""
        self._jobs += 1
        number = self._jobs
        done = await self._call_workers("begin", {"number": number, kind: info})
        while not all(done):
            await asyncio.sleep(PAUSE_S)
            done = await self._call_workers("poll", number)

    # workers --------------------------------------------------------------------------------------

    async def _call_workers(self, action: str, argument: Any = None) -> list[Any]:  # noqa: ANN401
        """Call a method of WeightSession in every worker and return the results.

        Raise Refusal with the first error, or if the argument can't be sent.
        """
        try:
            answers = await self._engine.collective_rpc("metronome", args=(action, argument))
        except OverflowError as error:  # a number of more than 64 bits; nothing was sent
            raise Refusal(400, f"a number in the body is too large: {error}") from None
        for answer in answers:
            if "error" in answer:
                raise Refusal(answer["status"], answer["error"], answer["kind"])
        return [answer["result"] for answer in answers]

    async def _read_version(self) -> int:
        versions = {state["weight_version"] for state in await self._call_workers("state")}
        if len(versions) != 1:
            raise Refusal(500, f"this instance's workers hold different weight versions: {sorted(versions)}")
        return int(versions.pop())
