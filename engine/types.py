"""The data types that all parts of the engine use: Prompt, Response, Score, Group, StepReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

JsonObject = dict[str, Any]
"""A JSON object that was read, or that is written to a file or page. The code that makes it defines its keys."""


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
    token_ids: Sequence[int]
    """The templated problem as token ids. Nothing else of the prompt is sent to a rollout instance."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row in the data file, for the user's own reward."""
    text: str = ""
    """The prompt as the model gets it, for the user's own reward: the problem in the template, with the start of the
    answer that some chat templates write (`<think>`). Like `columns`, empty in a group at the trainer."""


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt. Its sequences look like tuples; in a response received over the wire they
    are views of its bytes (engine.wire.columns.Numbers)."""

    token_ids: Sequence[int]
    """Sampled ids. If a stop token was sampled, it is the last one, and is trained."""
    logprobs: Sequence[float]
    """log softmax(logits / temperature) of each id, computed by the instance; same length as token_ids."""
    versions: tuple[tuple[int, int], ...]
    """Pairs of (first token index, weight version). There is one pair unless the response continued under new
    weights."""
    loss_mask: Sequence[bool]
    """Which tokens the model sampled; same length as token_ids. They are trained, unless the whole response is left out
    (`is_left_out`)."""
    finish_reason: str
    """"stop" (a stop token was sampled), "length" (a limit cut it) or "abort"."""
    text: str
    """The decoded response, for rewards: everything that the model wrote, without the tokens that begin, end or fill a
    sequence or end a turn (docs/data.md)."""
    seed: int | None
    """Seed of this response's own random stream; None if it was sampled from the instance's stream
    (docs/rollouts.md).
    """
    instance: str
    """Name of the rollout instance that sampled it."""

    @classmethod
    def of_text(cls, text: str) -> Response:
        """A response of which a built-in verifier needs only the text."""
        return cls((), (), (), (), "stop", text, 0, "")

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
    """"ok", "timeout" (the reward was killed at its time limit) or "error" (it raised, and reward.on_error is not
    "stop")."""
    detail: str = ""
    """A remark: why the status is not ok, or the answer that the reward extracted."""
    excluded: bool = False
    """Whether the response is left out of training because its reward is unknown. It has no gradient, and the
    advantages of its group are those of the other responses. `value` is not read then."""
    correct: bool | None = None
    """Whether the response counts as correct in pass@k and for algorithm.dynamic_sampling; None: `value` decides (1 and
    above does; in dynamic sampling, different ones)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name. steps.jsonl has their means and standard deviations over the step."""


@dataclass(frozen=True)
class BatchScores:
    """The scores and lengths of a step's whole batch, for advantages of batch scope. All are [B][G], in the order of
    the groups' indices."""

    values: tuple[tuple[float | None, ...], ...]
    """Rewards of the responses; None for an excluded one."""
    lengths: tuple[tuple[int, ...], ...]
    """All tokens of the responses."""
    trained: tuple[tuple[int, ...], ...]
    """Trained tokens of the responses."""


def is_left_out(finish_reason: str, excluded: bool, mask_truncated: bool) -> bool:
    """Return whether no token of a response is trained: its reward is unknown (`Score.excluded`), or a limit cut it and
    algorithm.mask_truncated is on. Of the other responses the tokens in `loss_mask` are trained."""
    return excluded or (mask_truncated and finish_reason == "length")


@dataclass(frozen=True)
class Group:
    """A prompt with all its responses and scores, and the columns that later stages have added. Between the
    orchestrator and the trainer it is a row (engine.wire.columns)."""

    step: int
    index: int
    """Position of the prompt in the step's batch, 0 … B−1. With "prompt_order" groups are trained in this order."""
    prompt: Prompt
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]
    batch: BatchScores | None = None
    """The scores of the whole batch, if the advantages depend on them."""
    mini_batch: int = 0
    """Number of the step's update that trains the group, 0 … train.updates − 1. The table sets it."""
    window: int = 0
    """In prompt order: number of the window with which the group is packed. The table sets it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Additional columns by name: an array with one number per response [G] or per token [sum of lengths], such as
    "reference_logprobs"."""


class OptionalFigures(TypedDict, total=False):
    """Figures that not every run has. The keys are those of `StepReport`; a key is absent if nothing was measured."""

    kl: float
    mfu: float
    grad_cosine: float
    skipped_updates: int
    skipped_updates_of_run: int
    expert_load_max: float
    reward_metrics: dict[str, float]


class LengthSpread(TypedDict):
    """The spread of a step's responses by length. The keys are those of `StepReport`."""

    response_length_p90: int
    response_length_max: int
    response_length_tail: float


class TrainingFigures(OptionalFigures, LengthSpread):
    """Figures that the trainer's ranks sum over a step. The keys are those of `StepReport`."""

    versions_seen: list[int]
    staleness_mean: float
    continued: int
    reward_mean: float
    reward_std: float
    response_length_mean: float
    truncated: int
    reward_timeouts: int
    reward_errors: int
    reward_excluded: int
    trained_tokens: int
    computed_tokens: int
    equal_groups: int
    loss: float
    entropy: float
    clip_fraction: float
    mismatch_dropped: float
    old_ratio_max: float
    max_ratio_gap: float
    mismatch_kl: float
    train_s: float
    score_s: float
    wait_first_s: float
    wait_s: float
    memory_peak_gib: list[float]


class UpdateFigures(TypedDict):
    """Figures of a step's updates. The keys are those of `StepReport`."""

    update_s: float
    grad_norm: float
    learning_rate: float


class StepFigures(TrainingFigures, UpdateFigures):
    """The trainer's report on a step. The orchestrator adds its own figures to make a `StepReport`."""

    sync_s: float
    check_s: float
    step_s: float
    wait_ratio: float
    rollout_to_train_end_s: float


@dataclass(frozen=True)
class StepReport:
    """One line of steps.jsonl. Times are wall-clock seconds, lengths and counts are tokens."""

    step: int
    weight_version: int
    versions_seen: list[int]
    staleness_mean: float
    """Mean number of steps between the weights that sampled a response and the weights being trained; 0 on-policy."""
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
    reward_excluded: int
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
    wait_ratio: float
    """Share of the step in which the trainer waited for responses: wait_s / step_s."""
    rollout_to_train_end_s: float
    """Time from when the batch's first prompt could be sent to the end of the update that the batch trained. In sync
    and periodic it is part of the step; in one_step_off and bounded a batch begins in an earlier step."""
    tokens_per_s_per_device: float
    loss: float
    entropy: float
    clip_fraction: float
    old_ratio_max: float
    max_ratio_gap: float
    mismatch_kl: float
    grad_norm: float
    learning_rate: float
    memory_peak_gib: list[float]
    """Peak memory of each trainer rank: of its device, or on a CPU, of its process."""
    response_length_p90: int = 0
    """The 90 % quantile of the responses' lengths, in tokens."""
    response_length_max: int = 0
    """Length of the longest response, in tokens."""
    response_length_tail: float = 0.0
    """Share of the responses' tokens that the longest tenth of the responses has: 0.1 if all are equally long."""
    kl: float | None = None
    """KL divergence from the reference; absent without a reference (algorithm.kl_coef = 0)."""
    mfu: float | None = None
    """Model FLOP utilisation, 0 to 1: the operations of the step's forward and backward passes (engine.model.flops;
    without recomputation and scoring passes) over train_s and the peak of the trainer's devices. Absent if the peak is
    unknown."""
    grad_cosine: float | None = None
    """Cosine between this step's gradient and the previous one; absent if it is not measured."""
    skipped_updates: int | None = None
    """Number of consecutive updates that gradient control has skipped; absent without gradient control."""
    skipped_updates_of_run: int | None = None
    """Number of updates that gradient control has skipped since the run began; absent without gradient control."""
    expert_load_max: float | None = None
    """Largest number of tokens (no filler) that one expert computed, divided by the mean of its layer's experts, in the
    layer where that ratio is largest: 1 is perfect balance. Absent for dense models."""
    prompts_used: int | None = None
    """Number of prompts up to the last one that was kept, with algorithm.dynamic_sampling; absent without it, and in a
    replay."""
    reward_tried: float | None = None
    """Mean reward over the responses to these prompts, kept or not."""
    sync_difference: float | None = None
    """Largest difference between the trainer's and an instance's log-probabilities of the fixed tokens
    (weights.check_tokens) after the last weight sync; absent if they are not compared."""
    mismatch_dropped: float = 0.0
    """Share of the trained tokens that algorithm.mismatch = "mask" or algorithm.mismatch_reject drops, weighted as in
    the loss."""
    continued: int = 0
    """Number of responses with tokens of more than one weight version (rollout.partial)."""
    reward_metrics: Mapping[str, float] | None = None
    """"reward/NAME" and "reward/NAME_std": mean and standard deviation of each metric of the scores, and of each of
    reward.functions, over the trained responses that have it. They are keys of the line themselves."""
