"""What the service checks of a group that comes from outside, as if an enemy had sent it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from engine.config import Config
from engine.errors import BadInput, TransferError
from engine.launcher.pool.reply_check import problem_of_logprobs, problem_of_tokens, problem_of_versions
from engine.schedule import Schedule
from engine.types import Group, Prompt, Response
from engine.wire.sealed import SealedGroup, open_group

REASONS = ("stop", "length")
STATUSES = ("ok", "timeout", "error")


@dataclass(frozen=True)
class GroupCheck:
    """The rules for groups from outside."""

    config: Config
    vocabulary: int
    """Number of token ids that the model knows."""

    def check(self, sealed: SealedGroup, newest: int) -> None:
        """Raise BadInput for a group that is damaged, incomplete or malformed, StaleRolloutError where a token's weight
        version is not accepted for the step. `newest`: the weight version that was published last."""
        where = f"step {sealed.step}, group {sealed.index}"
        try:
            group = open_group(sealed)
        except TransferError:
            raise BadInput(
                f"{where}: its {len(sealed.body)} bytes are not those that were sealed (another digest); send it again"
            ) from None
        except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
            raise BadInput(f"{where}: its body is no group: {error}") from None
        if wrong := self._problem(sealed, group, newest):
            raise BadInput(f"{where}: {wrong}")
        Schedule.of(self.config.train, self.config.rollout.partial).check(group)

    def _problem(self, sealed: SealedGroup, group: Group, newest: int) -> str:
        size = self.config.rollout.group_size
        prompts = self.config.train.prompts_per_step
        if not 0 <= sealed.index < prompts:
            return f"its index must be 0 to {prompts - 1} (train.prompts_per_step)"
        if len(group.responses) != size or len(group.scores) != size:
            return (
                f"it is incomplete: {len(group.responses)} responses and {len(group.scores)} scores, expected {size} "
                "(rollout.group_size)"
            )
        tokens = len(group.prompt.token_ids) + sum(len(response.token_ids) for response in group.responses)
        told = (sealed.tokens, sealed.lengths, sealed.rewards)
        lengths = tuple(len(response.token_ids) for response in group.responses)
        if told != (tokens, lengths, tuple(score.value for score in group.scores)) or sealed.mini_batch:
            return "its head (tokens, lengths, rewards) is not that of its body"
        if any(not np.isfinite(score.value) or score.status not in STATUSES for score in group.scores):
            return f"a score is not finite, or its status is none of {', '.join(STATUSES)}"
        if wrong := self.problem_of_prompt(group.prompt):
            return wrong
        problems = (self._problem_of_response(response, newest) for response in group.responses)
        return next((f"response {number}: {wrong}" for number, wrong in enumerate(problems) if wrong), "")

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
            or problem_of_logprobs(np.array(response.logprobs))
            or problem_of_versions(response.versions, count)
        )
