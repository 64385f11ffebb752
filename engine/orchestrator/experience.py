"""Takes input from outside: prompts to sample responses to, and groups that programs have sampled and scored.

`RowCheck` checks a group from outside as if an adversary had sent it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import Config
from engine.data.prompts import prompt_id
from engine.errors import BadInput, ServiceConflict, ServiceFull, TransferError
from engine.model.shape import Experts, read_shape
from engine.orchestrator.batches import Batch, BatchGenerator
from engine.orchestrator.batches_in_flight import BatchesInFlight
from engine.orchestrator.pool.reply_check import problem_of_logprobs, problem_of_tokens, problem_of_versions
from engine.orchestrator.rollout_service import RolloutService
from engine.orchestrator.run_state import RunState
from engine.orchestrator.table import RowTable
from engine.orchestrator.weight_sync.publish_requests import PublishRequests
from engine.reward.scorer import LARGEST_SCORE, METRIC_NAME, METRIC_NAMES
from engine.schedule import Schedule
from engine.types import Group, Prompt, Response
from engine.wire.columns import OWN, JsonColumns, Row, open_group, open_ids
from engine.wire.message import measure_values
from engine.wire.messages import Engines, InitEngines, PromptData, PutPrompts, PutRow, Sampled, SampleResponses, Taken
from engine.wire.routes import ROUTES, problem_of_form, problem_of_routes

REASONS = ("stop", "length")
STATUSES = ("ok", "timeout", "error")


@dataclass(frozen=True)
class RowCheck:
    """The rules for groups from outside."""

    config: Config
    vocabulary: int
    """Number of token ids that the model knows."""
    experts: Experts | None = None
    """The model's experts, if a group needs the routes of its tokens (algorithm.routing_replay)."""

    def check_row(self, row: Row, newest: int) -> None:
        """Raise BadInput for a group that is damaged, incomplete or malformed, and StaleRolloutError if a token's
        weight version is not accepted for the step. `newest`: the weight version that was published last."""
        where = f"step {row.step}, group {row.index}"
        expected = (*OWN, *([ROUTES] if self.experts else []))
        if row.names != frozenset(expected) or len(row.columns) != len(expected):
            names = ", ".join(column.name for column in row.columns)
            raise BadInput(f"{where}: it has the columns {names:.200}; expected {', '.join(expected)}")
        for column in row.columns:
            measure_values(column.body)
        try:
            group = open_group(row)
        except TransferError as error:
            raise BadInput(f"{where}: {error}; send it again") from None
        except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
            raise BadInput(f"{where}: a column is malformed: {error}") from None
        if wrong := self._problem(row, group, newest):
            raise BadInput(f"{where}: {wrong}")
        Schedule.of(self.config.train, self.config.rollout.partial).check_versions(group)

    def _problem(self, row: Row, group: Group, newest: int) -> str:
        size = self.config.rollout.group_size
        prompts = self.config.train.prompts_per_step
        if not 0 <= row.index < prompts:
            return f"its index must be 0 to {prompts - 1} (train.prompts_per_step)"
        if len(group.responses) != size or len(group.scores) != size:
            return (
                f"it is incomplete: {len(group.responses)} responses and {len(group.scores)} scores, expected {size} "
                "(rollout.group_size)"
            )
        lengths = tuple(len(response.token_ids) for response in group.responses)
        if (
            (row.tokens, row.lengths) != (len(group.prompt.token_ids) + sum(lengths), lengths)
            or row.mini_batch
            or row.window
        ):
            return (
                "its tokens and lengths do not match its columns, or its mini_batch is set, which only the "
                "orchestrator may set"
            )
        if any(not abs(score.value) <= LARGEST_SCORE or score.status not in STATUSES for score in group.scores):
            return (
                f"a score is not finite or larger than {LARGEST_SCORE:,.0f}, or its status is not one of "
                f"{', '.join(STATUSES)}"
            )
        metrics = [pair for score in group.scores for pair in score.metrics.items()]
        if any(not np.isfinite(value) or not METRIC_NAME.fullmatch(name) for name, value in metrics):
            return f"a metric of a score is not finite, or its name is not valid: a name has {METRIC_NAMES}"
        if wrong := self.problem_of_prompt(group.prompt):
            return wrong
        if self.experts and (wrong := self._problem_of_routes(row.tokens, group.columns[ROUTES], self.experts)):
            return wrong
        problems = (self._problem_of_response(response, newest) for response in group.responses)
        return next((f"response {number}: {wrong}" for number, wrong in enumerate(problems) if wrong), "")

    def _problem_of_routes(self, tokens: int, values: NDArray[Any], experts: Experts) -> str:
        return problem_of_form(values.dtype.name, values.shape, tokens, experts) or problem_of_routes(
            values, experts, unknown=True
        )

    def problem_of_prompt(self, prompt: Prompt) -> str:
        """Say what is wrong with a prompt's tokens; "" if nothing is."""
        longest = self.config.rollout.max_context
        if not 0 < len(prompt.token_ids) < longest:
            return f"its prompt has {len(prompt.token_ids)} tokens, expected 1 to {longest - 1} (rollout.max_context)"
        wrong = problem_of_tokens(np.array(prompt.token_ids, np.int64), self.vocabulary)
        return f"prompt: {wrong}" if wrong else ""

    def _problem_of_response(self, response: Response, newest: int) -> str:
        count = len(response.token_ids)
        if len(response.logprobs) != count or len(response.loss_mask) != count:
            return f"{count} tokens, {len(response.logprobs)} log-probabilities, {len(response.loss_mask)} masks"
        if count > self.config.rollout.max_new_tokens:
            return f"{count} tokens, more than rollout.max_new_tokens = {self.config.rollout.max_new_tokens}"
        if response.finish_reason not in REASONS:
            return f"finish_reason {response.finish_reason!r:.50}, expected one of {', '.join(REASONS)}"
        if any(version > newest for _, version in response.versions):
            return f"sampled from a weight version after {newest}, the newest that was published"
        return (
            problem_of_tokens(np.array(response.token_ids, np.int64), self.vocabulary)
            or problem_of_logprobs(np.array(response.logprobs, np.float64))
            or problem_of_versions(response.versions, count)
        )


SAMPLED_AT_ONCE = 8
"""Groups of external programs that are sampled or wait for it, as a multiple of the instances' places."""

Generate = Callable[[Batch, Sequence[tuple[int, Prompt]] | None], Coroutine[Any, Any, None]]


class Experience:
    """Begins steps, from prompts or with the first group that a program puts. Putting the same data twice has no
    effect."""

    def __init__(
        self,
        config: Config,
        service: RolloutService,
        run_state: RunState,
        table: RowTable,
        generator: BatchGenerator,
        batches: BatchesInFlight,
        publishing: PublishRequests,
        generate: Generate,
        started: Callable[[], None],
        weights: Path,
        trains: bool,
    ) -> None:
        """`generate`: makes the task that fills a batch. `started`: called when a step has begun. `weights`: folder for
        weights on their way to the instances. `trains`: whether the trainer is ours."""
        self._config = config
        self._service = service
        self._run_state = run_state
        self._table = table
        self._generator = generator
        self._batches = batches
        self._publishing = publishing
        self._generate_batch = generate
        self._started = started
        self._weights = weights
        self._trains = trains
        self._schedule = Schedule.of(config.train, config.rollout.partial)
        shape = read_shape(Path(config.model.path))
        self._check = RowCheck(config, shape.vocabulary, shape.experts if config.algorithm.routing_replay else None)
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
        """Bytes of groups and prompts from outside that are not trained yet."""
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
            other = "other prompts" if step in self._prompts else "groups from outside programs"
            raise ServiceConflict(f"step {step} already has {other}, so it takes no prompts")
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
        if wrong := self._check.problem_of_prompt(prompt):
            raise BadInput(f"prompt {number}: {wrong}")
        return prompt

    # groups ---------------------------------------------------------------------------------------

    async def put_row(self, request: PutRow) -> Taken:
        """Take a group from outside into the table. The first group of a step begins the step."""
        self._run_state.check_failure()
        row = request.row
        if self._trains and not self._config.data.pushed:
            raise ServiceConflict(
                f"step {row.step}: this run samples its groups from prompts; data.pushed = true lets programs put them"
            )
        if (known := self._known(row)) is not None and all(column in known.columns for column in row.columns):
            return Taken(new=False)  # even for a step that is no longer due
        newest = self._check_step(row.step)
        await asyncio.to_thread(self._check.check_row, row, newest)
        self._check_step(row.step)  # the version may have changed during the check
        if row.step in self._prompts:
            raise ServiceConflict(f"step {row.step} has prompts, and its groups are sampled here")
        if self._known(row) is None:
            self._check_room(row.bytes)
        if (batch := self._batches.get_batch(row.step)) is None:
            batch = self._generator.begin_batch(row.step)
            self._batches.keep_batch(batch)
            self._started()
        if new := self._table.add_row(row):
            self._bytes[row.step] = self._bytes.get(row.step, 0) + row.bytes
            batch.keep_sample(row)
            await self._run_state.notify()
        return Taken(new)

    def _known(self, row: Row) -> Row | None:
        return self._table.find_row(row.step, row.index) if row.step in self._table.steps else None

    async def sample_responses(self, request: SampleResponses) -> Sampled:
        """Sample responses to a prompt. Raises ServiceFull while too many programs wait for this."""
        self._run_state.check_failure()
        version = self._publishing.version
        if version is None:
            raise ServiceConflict("no weight version has been published yet, so no instance samples")
        prompt = Prompt("outside", "", "", _ids(request.prompt))
        most = self._config.rollout.group_size
        if wrong := self._check.problem_of_prompt(prompt):
            raise BadInput(wrong)
        if not 0 < len(request.seeds) <= most or any(not 0 <= seed < 2**63 for seed in request.seeds):
            raise BadInput(f"seeds: expected 1 to {most} (rollout.group_size) numbers of 0 to 2^63 - 1")
        places = self._config.groups_in_flight * max(1, self._service.pool.size)
        if self._sampling >= SAMPLED_AT_ONCE * places:
            raise ServiceFull(f"{self._sampling} groups are being sampled for programs outside; ask again later")
        self._sampling += 1
        try:
            return Sampled(tuple(await self._service.producer.sample(version, prompt, request.seeds)))
        finally:
            self._sampling -= 1


def _ids(buffer: bytes) -> Sequence[int]:
    try:
        return open_ids(buffer)
    except ValueError:
        raise BadInput(f"token ids: length {len(buffer)} is not a multiple of 4 (expected int32)") from None
