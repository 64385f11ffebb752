"""The data types that all parts of the engine use: Prompt, Response, Score, Group, StepReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

JsonObject = dict[str, Any]
"""An object of JSON as it was read, or as a file or page gets it: its keys are known where it is made."""


@dataclass(frozen=True)
class Prompt:
    """One problem, ready to be sent to a rollout instance."""

    id: str
    """Hash of problem and answer (hex). It is part of the sampling seed, so the seed does not depend on the order of
    the file."""
    problem: str
    """The problem's text in the data, before the prompt template."""
    answer: str
    """The gold answer that a reward compares with."""
    token_ids: tuple[int, ...]
    """The templated problem as token ids. Nothing else of the prompt is sent to a rollout instance."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row in the data file, for the user's own reward."""


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """Sampled ids. A sampled stop token is the last one, and is trained."""
    logprobs: tuple[float, ...]
    """log softmax(logits / temperature) of each id, computed by the instance; same length as token_ids."""
    versions: tuple[tuple[int, int], ...]
    """Pairs of (first token index, weight version). There is one pair unless the response continued under new
    weights."""
    loss_mask: tuple[bool, ...]
    """Which tokens are trained; same length as token_ids."""
    finish_reason: str
    """"stop" (a stop token was sampled), "length" (a limit cut it) or "abort"."""
    text: str
    """The decoded response without special tokens, for rewards."""
    seed: int
    """Seed of this response's own random stream."""
    instance: str
    """Name of the rollout instance that sampled it."""

    @property
    def truncated(self) -> bool:
        """Whether a length limit ended the response."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Score:
    """A reward's result for one response."""

    value: float
    """The reward R."""
    status: str = "ok"
    """"ok", "timeout" (the reward was killed at its time limit) or "error" (it raised, with reward.on_error =
    "zero")."""
    detail: str = ""
    """A remark: why the status is not ok, or the answer that the reward extracted."""


@dataclass(frozen=True)
class BatchScores:
    """The scores and lengths of a step's whole batch, for advantages of batch scope."""

    values: tuple[tuple[float, ...], ...]
    """[B][G] rewards of the groups' responses, in the order of the groups' indices."""
    lengths: tuple[tuple[int, ...], ...]
    """[B][G] lengths of the responses in tokens."""

    @staticmethod
    def of(groups: Sequence[Group]) -> BatchScores:
        """The scores of all groups of a step, which may be given in any order."""
        ordered = sorted(groups, key=lambda group: group.index)
        values = tuple(tuple(score.value for score in group.scores) for group in ordered)
        return BatchScores(
            values, tuple(tuple(len(response.token_ids) for response in group.responses) for group in ordered)
        )


@dataclass(frozen=True)
class Group:
    """A prompt with all its responses and scores. The sample queue holds groups, and a unit leases them."""

    step: int
    index: int
    """Position of the prompt in the step's batch, 0 … B−1. With "prompt_order" groups are trained in this order."""
    prompt: Prompt
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]
    batch: BatchScores | None = None
    """The scores of the whole batch, if the advantages depend on them."""
    advantages: tuple[float, ...] | None = None
    """Only in records of an older release, whose launcher computed the advantages of batch scope."""


@dataclass(frozen=True)
class Landed:
    """A response whose group is not complete yet, with the data that early scoring needs."""

    step: int
    group: int
    """Its group's index."""
    number: int
    """The response's number in the group."""
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


class GradientFigures(TypedDict, total=False):
    """What gradient control measured; keys as of `StepReport`, absent where nothing was measured."""

    grad_cosine: float
    skipped_updates: int


class TrainingFigures(GradientFigures):
    """What the trainer's ranks added up over a step; keys as of `StepReport`."""

    versions_seen: list[int]
    staleness_mean: float
    continued: int
    reward_mean: float
    reward_std: float
    response_length_mean: float
    truncated: int
    reward_timeouts: int
    reward_errors: int
    trained_tokens: int
    computed_tokens: int
    equal_groups: int
    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    old_ratio_max: float
    max_ratio_gap: float
    mismatch_kl: float
    train_s: float
    score_s: float
    wait_first_s: float
    wait_s: float
    memory_peak_gib: list[float]


class StepFigures(TrainingFigures):
    """What the trainer reports of a step; the launcher's own complete it to a `StepReport`."""

    sync_s: float
    check_s: float
    update_s: float
    step_s: float
    grad_norm: float
    learning_rate: float


@dataclass(frozen=True)
class StepReport:
    """One line of steps.jsonl. Times are wall-clock seconds, lengths and counts are tokens."""

    step: int
    weight_version: int
    versions_seen: list[int]
    staleness_mean: float
    """Mean number of updates between the weights that sampled a response and the weights that it trains; 0
    on-policy."""
    pool_size: int
    """Number of instances that take prompts or receive weights when the step ends."""
    reward_mean: float
    """Mean over the trained responses. With algorithm.dynamic_sampling these are the responses of the kept groups only
    (`reward_tried` is over all)."""
    reward_std: float
    response_length_mean: float
    truncated: int
    reward_timeouts: int
    reward_errors: int
    equal_groups: int
    """Number of groups whose rewards are all equal. They train only the KL term."""
    trained_tokens: int
    computed_tokens: int
    step_s: float
    rollout_s: float
    train_s: float
    score_s: float
    update_s: float
    wait_first_s: float
    wait_s: float
    sync_s: float
    check_s: float
    """The trainer's wait for the comparison of the instances' log-probabilities with its own."""
    tokens_per_s_per_device: float
    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    old_ratio_max: float
    max_ratio_gap: float
    mismatch_kl: float
    grad_norm: float
    learning_rate: float
    memory_peak_gib: list[float]
    """Peak memory of each trainer rank: of its device, or on a CPU of its process."""
    grad_cosine: float | None = None
    """Cosine of this step's gradient and the previous one; left out if it is not measured."""
    skipped_updates: int | None = None
    """Number of consecutive updates that gradient control has skipped; left out without it."""
    prompts_used: int | None = None
    """Number of prompts up to the last one that was kept, with algorithm.dynamic_sampling; left out without it, and in
    a replay."""
    reward_tried: float | None = None
    """Mean reward over the responses to these prompts, kept or not."""
    continued: int = 0
    """Number of responses with tokens of more than one weight version (rollout.partial)."""
