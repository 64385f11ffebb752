"""Takes input from outside: prompts to sample responses to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.config import Config
from engine.data.prompts import prompt_id
from engine.errors import BadInput, ServiceConflict, ServiceFull, WeightsLost
from engine.model.shape import read_shape
from engine.orchestrator.batches import Batch, BatchGenerator
from engine.orchestrator.batches_in_flight import BatchesInFlight
from engine.orchestrator.pool.reply_check import problem_of_tokens
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.run_state import SIGN_OF_LIFE_S, RunState
from engine.orchestrator.weight_sync.publish_requests import PublishRequests
from engine.schedule import Schedule
from engine.types import Prompt
from engine.wire.columns import JsonColumns, open_ids
from engine.wire.messages import Engines, InitEngines, PromptData, PutPrompts, Sampled, SampleResponses, Taken

SAMPLED_AT_ONCE = 8
"""Groups of external programs that are sampled or wait for it, as a multiple of the instances' places."""

Generate = Callable[[Batch, Sequence[tuple[int, Prompt]] | None], Coroutine[Any, Any, None]]


class Experience:
    """Begins steps from prompts. Putting the same prompts twice has no effect."""

    def __init__(
        self,
        config: Config,
        service: RolloutService,
        run_state: RunState,
        generator: BatchGenerator,
        batches: BatchesInFlight,
        publishing: PublishRequests,
        generate: Generate,
        started: Callable[[], None],
        weights: Path,
    ) -> None:
        """`generate`: makes the task that fills a batch. `started`: called when a step has begun. `weights`: folder for
        weights on their way to the instances."""
        self._config = config
        self._service = service
        self._run_state = run_state
        self._generator = generator
        self._batches = batches
        self._publishing = publishing
        self._generate_batch = generate
        self._started = started
        self._weights = weights
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._vocabulary = read_shape(Path(config.model.path)).vocabulary
        self._max_bytes = config.service.max_mib * 2**20
        self._prompts: dict[int, bytes] = {}
        """By step: the digest of its prompts."""
        self._bytes: dict[int, int] = {}
        """By step: number of bytes that programs have put."""
        self._over = -1
        """The newest step that has ended."""
        self._sampling = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of prompts from outside that are not trained yet."""
        return sum(self._bytes.values())

    def forget_step(self, step: int) -> None:
        """Forget a step that is over."""
        self._over = max(self._over, step)
        self.drop_step(step)

    def drop_step(self, step: int) -> None:
        """Forget what was put for a step, which may begin again."""
        self._prompts.pop(step, None)
        self._bytes.pop(step, None)

    async def init_engines(self, request: InitEngines) -> Engines:
        """Tell a program the recipe, the folder for weights, and the version that the instances hold."""
        return Engines(self._config.model_dump_json(), str(self._weights), self._publishing.verified)

    def _check_step(self, step: int) -> int:
        """Return the newest version. Raises ServiceConflict unless the schedule lets this version sample the step."""
        version = self._publishing.version
        if version is None:
            raise ServiceConflict(f"step {step}: no weight version has been published yet")
        last = version + self._schedule.ahead
        if not version <= step <= last:
            raise ServiceConflict(
                f"step {step}: with weight version {version} mode {self._config.train.mode!r} takes "
                + (f"step {last}" if last == version else f"steps {version} to {last}")
            )
        if step <= self._over:
            raise ServiceConflict(f"step {step} is over")
        return version

    def _check_room(self, size: int) -> None:
        if self.held_bytes + size > self._max_bytes:
            raise ServiceFull(
                f"the service holds {self.held_bytes:,} bytes that are not trained yet, and {size:,} more would exceed "
                f"{self._max_bytes:,} (service.max_mib)"
            )

    # prompts --------------------------------------------------------------------------------------

    async def put_prompts(self, request: PutPrompts) -> Taken:
        """Start a step. Its responses are sampled and scored in the background."""
        self._run_state.check_failure()
        step = request.step
        encoded = msgspec.msgpack.encode(request)
        digest = hashlib.sha256(encoded).digest()
        if self._prompts.get(step) == digest:
            return Taken(new=False)
        self._check_step(step)
        if self._batches.get_batch(step) is not None:
            raise ServiceConflict(f"step {step} already has other prompts")
        prompts = None
        if request.prompts is not None:
            self._check_room(len(encoded))
            prompts = [(step, prompt) for prompt in self._own_prompts(request.prompts)]
            self._bytes[step] = len(encoded)
        self._prompts[step] = digest
        batch = self._generator.begin_batch(step)
        self._batches.start_batch(batch, partial(self._generate_batch, batch, prompts))
        self._started()
        return Taken(new=True)

    def _own_prompts(self, given: tuple[PromptData, ...]) -> list[Prompt]:
        expected = self._config.train.prompts_per_step
        more = self._config.algorithm.dynamic_sampling
        if len(given) < expected or (len(given) > expected and not more):
            least = " or more" if more else ""
            raise BadInput(f"{len(given)} prompts, expected {expected}{least} (train.prompts_per_step)")
        return [self._own_prompt(number, data) for number, data in enumerate(given)]

    def _own_prompt(self, number: int, data: PromptData) -> Prompt:
        prompt = Prompt(
            id=prompt_id(data.problem, data.answer),
            problem=data.problem,
            answer=data.answer,
            token_ids=_ids(data.token_ids),
            columns=JsonColumns(data.columns),
            text=data.text,
        )
        if wrong := self._problem_of_prompt(prompt):
            raise BadInput(f"prompt {number}: {wrong}")
        return prompt

    def _problem_of_prompt(self, prompt: Prompt) -> str:
        """Say what is wrong with a prompt's tokens; "" if nothing is."""
        longest = self._config.rollout.max_context
        if not 0 < len(prompt.token_ids) < longest:
            return f"its prompt has {len(prompt.token_ids)} tokens, expected 1 to {longest - 1} (rollout.max_context)"
        wrong = problem_of_tokens(np.array(prompt.token_ids, np.int64), self._vocabulary)
        return f"prompt: {wrong}" if wrong else ""

    async def sample_responses(self, request: SampleResponses) -> Sampled:
        """Sample responses to a prompt. Raises ServiceFull while too many programs wait for this."""
        self._run_state.check_failure()
        version = self._publishing.version
        if version is None:
            raise ServiceConflict("no weight version has been published yet, so no instance samples")
        prompt = Prompt("outside", "", "", _ids(request.prompt))
        most = self._config.rollout.group_size
        if wrong := self._problem_of_prompt(prompt):
            raise BadInput(wrong)
        if not 0 < len(request.seeds) <= most or any(not 0 <= seed < 2**63 for seed in request.seeds):
            raise BadInput(f"seeds: expected 1 to {most} (rollout.group_size) numbers of 0 to 2^63 - 1")
        places = self._config.groups_in_flight * max(1, self._service.pool.size)
        if self._sampling >= SAMPLED_AT_ONCE * places:
            raise ServiceFull(f"{self._sampling} groups are being sampled for programs outside; ask again later")
        self._check_weights()
        self._sampling += 1
        sampling = asyncio.create_task(self._service.producer.sample(version, prompt, request.seeds))
        try:
            while not (await asyncio.wait([sampling], timeout=SIGN_OF_LIFE_S))[0]:
                self._check_weights()
            return Sampled(tuple(sampling.result()))
        finally:
            sampling.cancel()
            self._sampling -= 1

    def _check_weights(self) -> None:
        """Raise WeightsLost if no instance holds weights and the program that trains must publish them again."""
        if self._publishing.is_lost:
            raise WeightsLost(
                f"no instance holds weight version {self._publishing.version} any more: publish it again "
                "(weight_sync_notify), if the weights are still this version's"
            )


def _ids(buffer: bytes) -> Sequence[int]:
    try:
        return open_ids(buffer)
    except ValueError:
        raise BadInput(f"token ids: length {len(buffer)} is not a multiple of 4 (expected int32)") from None
