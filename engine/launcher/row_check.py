"""What is checked of a group that comes from outside, as if an enemy had sent it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import Config
from engine.errors import BadInput, TransferError
from engine.launcher.pool.reply_check import problem_of_logprobs, problem_of_tokens, problem_of_versions
from engine.model.shape import Experts
from engine.schedule import Schedule
from engine.types import Group, Prompt, Response
from engine.wire.columns import OWN, Row, open_group
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

    def check(self, row: Row, newest: int) -> None:
        """Raise BadInput for a group that is damaged, incomplete or malformed, StaleRolloutError where a token's weight
        version is not accepted for the step. `newest`: the weight version that was published last."""
        where = f"step {row.step}, group {row.index}"
        expected = (*OWN, *([ROUTES] if self.experts else []))
        if row.names != frozenset(expected) or len(row.columns) != len(expected):
            names = ", ".join(column.name for column in row.columns)
            raise BadInput(f"{where}: it has the columns {names:.200}; expected {', '.join(expected)}")
        try:
            group = open_group(row)
        except TransferError as error:
            raise BadInput(f"{where}: {error}; send it again") from None
        except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
            raise BadInput(f"{where}: a column is malformed: {error}") from None
        if wrong := self._problem(row, group, newest):
            raise BadInput(f"{where}: {wrong}")
        Schedule.of(self.config.train, self.config.rollout.partial).check(group)

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
        if (row.tokens, row.lengths) != (len(group.prompt.token_ids) + sum(lengths), lengths) or row.mini_batch:
            return (
                "its tokens and lengths are not those of its columns, or its mini_batch is set, which is the launcher's"
            )
        if any(not np.isfinite(score.value) or score.status not in STATUSES for score in group.scores):
            return f"a score is not finite, or its status is none of {', '.join(STATUSES)}"
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
