"""The nouns that every part of the engine passes around: Prompt, Response, Score, Group, StepReport."""

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
    """Content hash of problem and answer (hex); part of the sampling seed, so it never depends on file order."""
    problem: str
    """The problem's text as it stands in the data, before the prompt template."""
    answer: str
    """The gold answer that a verifier compares with."""
    token_ids: tuple[int, ...]
    """The templated problem as token ids; the only thing that crosses to a rollout instance."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every column of the row in the data file, for the user's own reward."""


@dataclass(frozen=True)
class Response:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """Sampled ids; the stop token, if one was sampled, is the last and is trained."""
    logprobs: tuple[float, ...]
    """log softmax(logits / temperature) of each id, as the instance computed it; same length as token_ids."""
    versions: tuple[tuple[int, int], ...]
    """Runs of (first token index, weight version); one run unless the response crossed a weight boundary."""
    loss_mask: tuple[bool, ...]
    """Which tokens are trained; same length as token_ids."""
    finish_reason: str
    """"stop" (a stop token was sampled), "length" (a limit cut it) or "abort"."""
    text: str
    """The decoded response without special tokens; what verifiers read."""
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
    """A verifier's verdict on one response."""

    value: float
    """The reward R."""
    status: str = "ok"
    """"ok", "timeout" (the verifier was killed at its limit) or "error" (it raised, with reward.on_error = "zero")."""
    detail: str = ""
    """For people: why the status is not ok, or what the verifier extracted."""


@dataclass(frozen=True)
class BatchScores:
    """The scores and lengths of a step's whole batch, for advantages whose statistics are over all of it."""

    values: tuple[tuple[float, ...], ...]
    """[B][G] rewards R of the groups' responses, in the order of the groups' indices."""
    lengths: tuple[tuple[int, ...], ...]
    """[B][G] response tokens."""

    @staticmethod
    def of(groups: Sequence[Group]) -> BatchScores:
        """Of all groups of a step, given in any order."""
        ordered = sorted(groups, key=lambda group: group.index)
        values = tuple(tuple(score.value for score in group.scores) for group in ordered)
        return BatchScores(
            values, tuple(tuple(len(response.token_ids) for response in group.responses) for group in ordered)
        )


@dataclass(frozen=True)
class Group:
    """A prompt with all its responses and scores: what the sample queue holds and a replica leases."""

    step: int
    index: int
    """Position of the prompt in the step's batch, 0 … B−1; groups are trained in this order under "prompt_order"."""
    prompt: Prompt
    responses: tuple[Response, ...]
    scores: tuple[Score, ...]
    batch: BatchScores | None = None
    """Of the whole batch, where advantages depend on it."""
    advantages: tuple[float, ...] | None = None
    """Only of a record of an older release, whose launcher computed those that depend on the whole batch."""


@dataclass(frozen=True)
class Landed:
    """A response whose group is not complete yet: all that scoring it early needs."""

    step: int
    group: int
    """Its group's index."""
    number: int
    """Its own number in the group."""
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
    """Updates between the weights that sampled a response and those that train it; 0 on-policy."""
    pool_size: int
    """Instances that take prompts, or are being given weights, when the step ends."""
    reward_mean: float
    """Over the trained responses: with algorithm.dynamic_sampling those of the kept groups
    alone (`reward_tried` is over all)."""
    reward_std: float
    response_length_mean: float
    truncated: int
    reward_timeouts: int
    reward_errors: int
    equal_groups: int
    """Groups whose rewards are all equal: they teach nothing but the KL."""
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
    """The comparison of the instances' log-probabilities with the trainer's, beside the first responses."""
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
    """Of each trainer rank: of its device, on a CPU of its process."""
    grad_cosine: float | None = None
    """Of this step's gradient with the last one; left out where it is not measured."""
    skipped_updates: int | None = None
    """In a row, by gradient control; left out without it."""
    prompts_used: int | None = None
    """Prompts up to the last one that was kept, with algorithm.dynamic_sampling;
    left out without it, and by a replay."""
    reward_tried: float | None = None
    """Mean over the responses to those prompts, kept or not."""
    continued: int = 0
    """Responses with tokens of more than one weight version (rollout.partial)."""
