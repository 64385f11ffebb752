"""Begins steps from prompts, and has their responses sampled and scored. The producer gets the prompts; each group
becomes a row of its step, first with its responses, then with their scores."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.config import Config
from engine.data.loader import PromptLoader
from engine.data.prompts import prompt_id
from engine.errors import BadInput, MetronomeError, ServiceConflict, ServiceFull, WeightsLost
from engine.model.shape import read_shape
from engine.orchestrator.dynamic_sampling import MOST_BATCHES, DynamicSampling
from engine.orchestrator.leases import Leases
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.reply_check import problem_of_tokens
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.run_state import SIGN_OF_LIFE_S, RunState
from engine.orchestrator.steps import Step, Steps
from engine.run.folder import SAMPLED_GROUPS
from engine.run.logs import log_line, log_traceback
from engine.schedule import Schedule
from engine.types import Prompt
from engine.wire.columns import JsonColumns, Row, open_ids, open_scores
from engine.wire.messages import MOST_BYTES, PromptData, PutPrompts, Sampled, SampleResponses, Taken
from engine.wire.rollout_messages import Acknowledged, InstanceRequest, StartProfile, StopProfile

if TYPE_CHECKING:
    from engine.orchestrator.in_run_evaluation import InRunEvaluation

SAMPLED_AT_ONCE = 8
"""Groups of external programs that are sampled or wait for it, as a multiple of the instances' places."""

Put = Callable[[Row], Awaitable[None]]
Prompts = Sequence[tuple[int, Prompt]]
"""(epoch, prompt) of groups."""


class RolloutProfile:
    """Has the run's own instances record a profile, from the start of the first batch in train.profile until the last
    one is generated. An instance that can't record one reports this, and the run goes on."""

    def __init__(self, service: RolloutService, steps: Sequence[int]) -> None:
        """`steps`: the first and the last step, or empty."""
        self._service = service
        self._steps = range(steps[0], steps[1] + 1) if steps else range(0)
        self._begun = False
        self._recording: list[Instance] = []

    async def begin_step(self, step: int) -> None:
        """Start recording when the generation of a batch begins. A resumed run may begin after the first batch."""
        if step in self._steps and not self._begun:
            self._begun = True
            own = [instance for instance in self._service.pool.instances if instance.declared is not None]
            self._recording = await self._send(own, StartProfile)

    async def end_step(self, step: int) -> None:
        """Stop recording once the last batch is generated."""
        if self._recording and step == self._steps[-1]:
            recording = self._recording
            self._recording = []
            await self._send(recording, StopProfile)

    async def _send(
        self, instances: Sequence[Instance], request: type[InstanceRequest[Acknowledged]]
    ) -> list[Instance]:
        """Send the request to all instances. Return those that carried it out."""
        replies = await asyncio.gather(*(one.client.call(request()) for one in instances), return_exceptions=True)
        done: list[Instance] = []
        for one, reply in zip(instances, replies, strict=True):
            if isinstance(reply, MetronomeError):
                log_line(f"train.profile: {one.name} is not profiled: {reply}")
            elif isinstance(reply, BaseException):
                raise reply
            else:
                done.append(one)
        return done


class Batches:
    """Begins steps and generates their batches. Putting the same prompts twice has no effect. With dynamic sampling, a
    batch begins after the last prompt that the previous batch used."""

    def __init__(
        self,
        config: Config,
        loader: PromptLoader,
        service: RolloutService,
        run_state: RunState,
        steps: Steps,
        publishes: Publishes,
        leases: Leases,
        evaluation: InRunEvaluation | None = None,
        trains: bool = True,
    ) -> None:
        """`evaluation`: the evaluation in the run, if it has one. `trains`: whether the trainer is ours."""
        self._config = config
        self._loader = loader
        self._service = service
        self._run_state = run_state
        self._steps = steps
        self._publishes = publishes
        self._leases = leases
        self._evaluation = evaluation
        self._trains = trains
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        self._vocabulary = read_shape(Path(config.model.path)).vocabulary
        self._profile = RolloutProfile(service, config.train.profile)
        self._position = 0
        self._previous: Step | None = None
        """With dynamic sampling: the step whose batch must be generated before the next one."""
        self._sampling = 0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the run's prompts, in their order."""
        return self._loader.fingerprint

    @property
    def held_bytes(self) -> int:
        """Bytes of prompts from outside that are not trained yet."""
        return sum(step.held_bytes for step in self._steps.values())

    def resume_at(self, step: int, position: int | None, prompts: str | None = None) -> None:
        """Begin with `step`. The trainer's checkpoint gives the other two: `position` is the number of prompts used
        before `step`, and `prompts` is the fingerprint of the run's prompts.

        Raises BadInput if the checkpoint was trained on other prompts, or if dynamic sampling needs the position and
        the checkpoint does not have it.
        """
        if prompts not in (None, self.fingerprint) and "prompts" not in self._config.run.accept:
            raise BadInput(
                "--resume: the prompts of this run, their order, tokens or columns differ from those that its "
                "checkpoint was trained on. They depend on the content of data.train and data.heldout, on the "
                "benchmarks that data.train is compared with (evaluate.benchmark, evaluate.folder), on "
                "reward.function and rollout.max_context, and their tokens on the tokenizer of model.path and its chat "
                "template: resume with these unchanged, or start a new run from the trained policy"
            )
        if self._config.algorithm.dynamic_sampling and step and position is None:
            raise BadInput(
                f"--resume: the checkpoint before step {step} does not say how many prompts were used, which "
                "algorithm.dynamic_sampling needs (a replay wrote it); resume from another checkpoint"
            )
        self._position = position or 0
        self._previous = None

    # requests -------------------------------------------------------------------------------------

    async def put_prompts(self, request: PutPrompts) -> Taken:
        """Start a step. Its responses are sampled and scored in the background."""
        self._run_state.check_failure()
        encoded = msgspec.msgpack.encode(request)
        digest = hashlib.sha256(encoded).digest()
        known = self._steps.find(request.step)
        if known is not None and known.prompts == digest:
            return Taken(new=False)
        self._check_step(request.step)
        if known is not None:
            raise ServiceConflict(f"step {request.step} already has other prompts")
        own = request.prompts
        if own is not None:
            self._check_room(len(encoded))
        prompts = None if own is None else [(request.step, prompt) for prompt in self._own_prompts(own)]
        step = self._steps.begin(request.step, self._config.train.prompts_per_step)
        step.prompts = digest
        step.held_bytes = 0 if own is None else len(encoded)
        before = None
        if self._config.algorithm.dynamic_sampling:
            before, self._previous = self._previous, step
        step.task = asyncio.create_task(self._generate(step, prompts, before))
        if self._trains:
            self._leases.expect_requests()
        return Taken(new=True)

    def _check_step(self, step: int) -> None:
        """Raise ServiceConflict unless the schedule lets the newest version sample the step."""
        version = self._publishes.version
        if version is None:
            raise ServiceConflict(f"step {step}: no weight version has been published yet")
        last = version + self._schedule.ahead
        if not version <= step <= last:
            raise ServiceConflict(
                f"step {step}: with weight version {version} mode {self._config.train.mode!r} takes "
                + (f"step {last}" if last == version else f"steps {version} to {last}")
            )
        if self._steps.last is not None and step <= self._steps.last.number:
            raise ServiceConflict(f"step {step} is over")

    def _check_room(self, size: int) -> None:
        if self.held_bytes + size > MOST_BYTES:
            raise ServiceFull(
                f"the service holds {self.held_bytes:,} bytes that are not trained yet, and {size:,} more would exceed "
                f"{MOST_BYTES:,}; put it again once the trainer has taken some"
            )

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
        version = self._publishes.version
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
        if self._publishes.is_lost:
            raise WeightsLost(
                f"no instance holds weight version {self._publishes.version} any more: publish it again "
                "(weight_sync_notify), if the weights are still this version's"
            )

    # generation -----------------------------------------------------------------------------------

    async def _generate(self, step: Step, prompts: Prompts | None, before: Step | None) -> None:
        """Wait for the weights that the step needs, then generate its batch. With dynamic sampling, wait first
        until the batch of the step `before` is generated.

        `prompts`: those of the groups; None: the next ones of the data. A MetronomeError ends the run. Any other
        exception but a full disk is a bug: it ends our own run, too, but in a service only the step.
        """
        try:
            if self._publishes.swap is not None and (self._schedule.exact or self._config.rollout.partial):
                await asyncio.wait([self._publishes.swap])  # the batch needs the new version from its first token on
            if before is not None and before.task is not None:
                await asyncio.wait([before.task])
                if before.next_position is None:
                    return  # the previous batch failed, and so did the run
                self._position = before.next_position
            await self._profile.begin_step(step.number)
            started = time.perf_counter()

            async def put(row: Row) -> None:
                if len(step.samples) < SAMPLED_GROUPS:
                    step.samples.append(row)
                await self._put(row)
                step.rollout_s = time.perf_counter() - started

            if self._config.algorithm.dynamic_sampling:
                await self._generate_selected(step, put, prompts)
            else:  # responses come before they are scored, so that stages that do not need the scores can begin
                due = prompts or self._prompts(step.number)
                await self._service.producer.run(step=step.number, prompts=due, put=put, sampled=self._put)
            await self._profile.end_step(step.number)
            if self._evaluation is not None and not self._schedule.ahead:
                self._evaluation.evaluate_version(step.number)
        except MetronomeError as error:
            await self._run_state.stop_run(error)
        except OSError:
            raise  # a full disk, which the orchestrator names
        except Exception as error:
            log_traceback(error)  # as after any other failure, the trainer saves a checkpoint
            await self._fail(step, before, f"unexpected {type(error).__name__}: {error}")

    async def _fail(self, step: Step, before: Step | None, why: str) -> None:
        """End our own run, or in a service the step, which may be put again."""
        what = f"step {step.number}: its generation failed, {why}"
        if self._trains:
            await self._run_state.stop_run(MetronomeError(f"{what}; the orchestrator's log has the traceback"))
            return
        self._previous = before
        more = "the traceback is in the service's log; put its prompts again"
        self._steps.drop(step.number, MetronomeError(f"{what}; {more}"))
        await self._run_state.notify()

    async def _put(self, row: Row) -> None:
        """Put a row into its step, or only its new columns if the row is already there."""
        known = self._steps.find_row(row.step, row.index)
        if known is not None:
            row = row.only(row.names - known.names)
        kept = await self._steps.store.put_columns(row)
        if known is None:
            self._steps.add_row(kept)
        else:
            self._steps.add_columns(kept.step, kept.index, kept.columns)
        await self._run_state.notify()

    def _prompts(self, step: int) -> list[tuple[int, Prompt]]:
        """Return (epoch, prompt) of each group of the step."""
        return [(self._loader.epoch_of(step, i), prompt) for i, prompt in enumerate(self._loader.batch(step))]

    async def _generate_selected(self, step: Step, put: Put, prompts: Prompts | None) -> None:
        """Generate groups for the next prompts until enough of them have unequal rewards (dynamic sampling)."""
        wanted = self._config.train.prompts_per_step
        position = self._position
        limit = wanted * MOST_BATCHES if prompts is None else len(prompts)
        selection = DynamicSampling(wanted, limit, step.number)
        rewards: dict[int, float] = {}

        async def decide(row: Row) -> None:
            rewards[row.index] = fmean(score.value for score in open_scores(row))
            due = selection.add_group(row)
            if due and selection.used is not None:
                step.reward_tried = fmean(rewards[number] for number in range(selection.used))
                step.prompts_used = selection.used
                step.next_position = position + selection.used
            for one in due:
                await put(one)

        tried = map(self._loader.at, itertools.count(position)) if prompts is None else iter(prompts)
        await self._service.producer.run_until(step.number, tried, decide, selection)

    async def check_generation(self) -> None:
        """Stop the run if a generation ended with groups missing. Raises an OSError of a generation."""
        for step in self._steps.values():
            if step.task is not None and step.task.done():
                step.task.result()
                if self._run_state.failure is None and not step.is_generated:
                    await self._run_state.stop_run(
                        MetronomeError(
                            f"step {step.number}: its generation ended with {step.arrived} of {step.expected} "
                            "groups, so the trainer would wait for ever"
                        )
                    )

    async def close(self) -> None:
        """Cancel the generations in progress."""
        tasks = [step.task for step in self._steps.values() if step.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ids(buffer: bytes) -> Sequence[int]:
    try:
        return open_ids(buffer)
    except ValueError:
        raise BadInput(f"token ids: length {len(buffer)} is not a multiple of 4 (expected int32)") from None
