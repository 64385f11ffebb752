"""Estimates the coefficients of `Costs` from the traces of runs, by least squares of relative errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.trace import Span, iterate_spans
from engine.tools.planner.costs import Costs
from engine.tools.planner.search import change_config

ORCHESTRATOR_TOKEN_S = 1e-6
"""CPU seconds of the orchestrator per token of a response of 16k tokens, for reading the reply, its text and its
arrays."""
SLOWDOWNS = np.arange(1.0, 2.01, 0.02)
"""Slowdown factors that are tried."""
RIDGE = 1e-5
"""Weight of the coefficients' own squares. If two figures always grow together, each coefficient then gets a part."""
REWEIGHTED = 4
"""Number of fits. Each one weights the errors by the predictions of the fit before."""
LEAST = 8
"""Minimum number of windows, and of responses, for fitting coefficients."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class MeasuredRun:
    """A run's trace and figures, without its first step, in which processes warm up."""

    where: str
    config: Config
    spans: list[Span]
    steps: list[Mapping[str, Any]]
    """Lines of steps.jsonl."""

    @property
    def sampled(self) -> list[Span]:
        """The run's responses."""
        return [span for span in self.spans if span["name"] == "rollout" and span.get("tokens")]

    @property
    def trained(self) -> list[Span]:
        """The run's windows, except those that were held for an update. If several ranks hold the same tokens, only one
        of them has the windows."""
        windows = [span for span in self.spans if span["name"] == "train" and "groups" in span]
        return [span for span in windows if span.get("computed_tokens")]


def read_run(folder: Path, last: int = 0) -> MeasuredRun:
    """Read the measurements of a run. `last`: use only this many of its last steps (0: all). Raises BadInput for a
    folder without a run, and for a run that is too short."""
    if not (folder / "config.toml").is_file():
        raise BadInput(f"--from {folder}: no config.toml there, so it is not a run folder")
    steps = list(read_lines(folder / "steps.jsonl"))[1:][-last:]
    first = steps[0]["step"] if steps else 1
    run = MeasuredRun(
        str(folder),
        load_config(folder / "config.toml"),
        [span for span in iterate_spans(folder / "trace") if span.get("step", 0) >= first],
        steps,
    )
    if not (run.sampled and run.trained and run.steps):
        raise BadInput(
            f"--from {folder}: after the first step its trace has the sizes of {len(run.sampled)} responses and "
            f"{len(run.trained)} windows; give a longer run"
        )
    return run


def fit_costs(runs: Sequence[MeasuredRun]) -> Costs:
    """Fit the costs that best explain runs of one layout. Raises BadInput if all runs together have too few windows or
    responses."""
    responses = sum(len(run.sampled) for run in runs)
    windows = sum(len(run.trained) for run in runs)
    if min(responses, windows) < LEAST:
        raise BadInput(
            f"--from {', '.join(run.where for run in runs)}: {responses} responses and {windows} windows after the "
            f"first step, and at least {LEAST} of each are needed: run more steps, or give more runs"
        )
    decode, rollout_slowdown = _decode(runs)
    window, train_slowdown = _windows(runs)
    names = ("sync", "update", "overhead", "verify")
    rest = {name: fmean(_medians(run)[name] for run in runs) for name in names}
    return Costs(
        **decode,
        **window,
        **rest,
        orchestrator_token=ORCHESTRATOR_TOKEN_S,
        train_slowdown=train_slowdown,
        rollout_slowdown=rollout_slowdown,
        source=f"measured: {', '.join(run.where for run in runs)}",
        exceptions={"orchestrator_token": "prior"},
    )


def _medians(run: MeasuredRun) -> dict[str, float]:
    """The time that a step takes apart from decoding and windows."""
    sync = [line["sync_s"] for line in run.steps]
    known = ("sync_s", "wait_s", "train_s", "update_s")
    verify = [span["end"] - span["start"] for span in run.spans if span["name"] == "verify"]
    return {
        # off-policy, it includes the time until the batches in flight are generated
        "sync": median(sync) if run.config.train.mode in ("sync", "periodic") else min(sync),
        "update": median(line["update_s"] for line in run.steps) / run.config.train.updates,
        "overhead": max(0.0, median(line["step_s"] - sum(line[name] for name in known) for line in run.steps)),
        "verify": median(verify) if verify else 0.0,
    }


class _Integral:
    """∫ of the number of intervals that cover a time, each with a weight that may grow linearly within the interval."""

    def __init__(self, starts: Array, ends: Array, first: Array, last: Array) -> None:
        """The weights grow from `first` to `last`."""
        growth = (last - first) / np.maximum(ends - starts, 1e-9)
        self._parts = [
            (sign, *_sorted_sums(times, weight, growth))
            for sign, times, weight in ((1.0, starts, first), (-1.0, ends, last))
        ]

    def until(self, times: Array) -> Array:
        """The integral from before all intervals to each of the times."""
        total = np.zeros_like(times)
        for sign, at, sums in self._parts:
            count = np.searchsorted(at, times)
            weight, weight_at, growth, growth_at, growth_at2 = (each[count] for each in sums)
            total += sign * (weight * times - weight_at)
            total += sign * (growth * times**2 - 2 * growth_at * times + growth_at2) / 2
        return total

    def mean(self, starts: Array, ends: Array) -> Array:
        """The mean over each of these intervals."""
        result: Array = (self.until(ends) - self.until(starts)) / np.maximum(ends - starts, 1e-9)
        return result


def _sorted_sums(times: Array, weight: Array, growth: Array) -> tuple[Array, list[Array]]:
    order = np.argsort(times)
    at = times[order]
    weights = weight[order]
    growths = growth[order]
    columns = (weights, weights * at, growths, growths * at, growths * at**2)
    return at, [np.concatenate([[0.0], np.cumsum(column)]) for column in columns]


def _columns(spans: Sequence[Any], names: Sequence[str]) -> list[Array]:
    return [np.array([float(span[name]) for span in spans]) for name in names]


def _decode(runs: Sequence[MeasuredRun]) -> tuple[dict[str, float], float]:
    """Coefficients of decoding. A response of t tokens takes t steps, each with the mean load during its time, and
    waits for the prompts that begin on its instance during that time. A step costs no less than a token of a prompt,
    since both are a pass of the model; otherwise, a short run may suggest that decoding costs nothing."""
    parts = [_decoded(run, lane) for run in runs for lane in sorted({span["lane"] for span in run.sampled})]
    found, slowdown = _fit(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    beyond_prefill, response, context, prefill = found
    decode = {"decode_step": beyond_prefill + prefill, "decode_response": response, "decode_context": context}
    return decode | {"prefill_token": prefill}, slowdown


def _decoded(run: MeasuredRun, lane: str) -> tuple[Array, Array, Array]:
    """Rows, seconds, and shares of time in which the trainer computed, for an instance's responses. The columns: what a
    step costs beyond a token of a prompt, each response in flight, each token of context, a token of a prompt."""
    zero = run.sampled[0]["start"]
    spans = [span for span in run.sampled if span["lane"] == lane]
    starts, ends, prompts, tokens = _columns(spans, ("start", "end", "prompt_tokens", "tokens"))
    starts -= zero
    ends -= zero
    ones = np.ones_like(starts)
    active = _Integral(starts, ends, ones, ones).mean(starts, ends)
    context = _Integral(starts, ends, prompts, prompts + tokens).mean(starts, ends)
    begun = _prompts_between(spans, zero, starts, ends)
    rows = np.stack([tokens, tokens * active, tokens * context, tokens + begun], axis=1)
    return rows, ends - starts, _busy(run.trained, zero).mean(starts, ends)


def _prompts_between(spans: Sequence[Span], zero: float, starts: Array, ends: Array) -> Array:
    """Prompt tokens of the groups that begin on the instance within each of the times."""
    first: dict[tuple[int, int], tuple[float, int]] = {}
    for span in spans:
        group = (span["step"], span["group"])
        began = span["start"] - zero
        first[group] = min(first.get(group, (began, span["prompt_tokens"])), (began, span["prompt_tokens"]))
    at, tokens = np.array(sorted(first.values())).T
    sums = np.concatenate([[0.0], np.cumsum(tokens)])
    early = np.searchsorted(at, starts - 0.005)  # the responses of a group are sent one after the other
    counted: Array = sums[np.searchsorted(at, ends)] - sums[early]
    return counted


def _windows(runs: Sequence[MeasuredRun]) -> tuple[dict[str, float], float]:
    """Coefficients of the trainer's windows."""
    found, slowdown = _fit(*(np.concatenate(each) for each in zip(*map(_trained, runs), strict=True)))
    return dict(zip(("window", "micro_batch", "token", "square"), found, strict=True)), slowdown


def _trained(run: MeasuredRun) -> tuple[Array, Array, Array]:
    """Rows, seconds, and shares of time in which instances sampled, for a run's windows."""
    zero = run.sampled[0]["start"]
    pipeline = run.config.parallel.pipeline
    squares: dict[tuple[int, int], float] = defaultdict(float)
    for span in run.sampled:
        squares[span["step"], span["group"]] += (span["prompt_tokens"] + span["tokens"]) ** 2
    starts, ends, count, tokens = _columns(run.trained, ("start", "end", "micro_batches", "computed_tokens"))
    starts -= zero
    ends -= zero
    tokens *= run.config.parallel.context  # a span has its rank's share of the rows
    each = np.array([sum(squares[span["step"], index] for index in span["groups"]) for span in run.trained])
    filled = (pipeline - 1 + count) / (pipeline * np.maximum(count, 1))
    rows = np.stack([np.ones_like(count), count * filled, tokens * filled, each * filled], axis=1)
    return rows, ends - starts, _busy(run.sampled, zero).mean(starts, ends)


def _busy(spans: Sequence[Span], zero: float) -> _Integral:
    """Whether any of the spans covers a time, as an integral of 0 and 1."""
    borders: list[list[float]] = []
    for start, end in sorted((span["start"] - zero, span["end"] - zero) for span in spans):
        if borders and start <= borders[-1][1]:
            borders[-1][1] = max(borders[-1][1], end)
        else:
            borders.append([start, end])
    starts, ends = np.array(borders).T
    ones = np.ones_like(starts)
    return _Integral(starts, ends, ones, ones)


LAST_STEPS = 10
"""Number of last steps that say what a run was bound by."""
LONG_TAIL = 0.25
"""Share of the tokens in the longest tenth of responses above which they are long-tailed. It is 0.1 if all are equally
long, 0.19 if lengths are spread evenly from 0 to their maximum, 0.33 if they are exponential."""
BOUNDS = {
    "rollout": "more instances on further devices help",
    "rewards": "a faster reward, more reward.workers or a shorter reward.timeout_s helps",
    "training": "more devices for training help (parallel.data)",
    "weight syncs and updates": "larger steps help (train.prompts_per_step)",
}
"""What bounds a step, and what helps against it."""
FEW_LONG = "few long responses, so more instances help little: shorten the longest (docs/concepts.md)"


def describe_bound(folder: Path) -> str:
    """What the last steps of a run were bound by, and what helps against it. For rollouts this is verl's guideline for
    one step off: more instances do not help if few long responses are what the trainer waits for. Raises BadInput for a
    run that is too short to tell."""
    run = read_run(folder, LAST_STEPS)
    spent = {
        key: sum(line[key] for line in run.steps) for key in ("wait_s", "train_s", "sync_s", "check_s", "update_s")
    }
    rewards = spent["wait_s"] * _reward_share(run)
    rest = spent["sync_s"] + spent["check_s"] + spent["update_s"]
    shares = dict(zip(BOUNDS, (spent["wait_s"] - rewards, rewards, spent["train_s"], rest), strict=True))
    bound = max(shares, key=lambda name: shares[name])
    long = fmean(line.get("response_length_tail", 0.0) for line in run.steps) > LONG_TAIL
    share = shares[bound] / sum(line["step_s"] for line in run.steps)
    helps = FEW_LONG if bound == "rollout" and long else BOUNDS[bound]
    return f"{bound} ({share:.0%} of a step): {helps}; metronome plan --from {folder} predicts other settings"


def _reward_share(run: MeasuredRun) -> float:
    """Share of the trainer's waiting in which rewards were computed and no instance sampled."""
    waits, scored = ([span for span in run.spans if span["name"] == name] for name in ("wait", "verify"))
    if not waits or not scored:
        return 0.0
    zero = run.sampled[0]["start"]
    starts, ends = (times - zero for times in _columns(waits, ("start", "end")))
    idle = 1 - _busy(run.sampled, zero).mean(starts, ends)
    shares = np.minimum(idle, _busy(scored, zero).mean(starts, ends))
    return float(np.average(shares, weights=np.maximum(ends - starts, 1e-9)))


def _fit(rows: Array, targets: Array, shares: Array) -> tuple[list[float], float]:
    """Return coefficients ≥ 0 and a slowdown k with rows · coefficients · (1 + (k − 1) share) ≈ targets.

    Least squares with each error relative to the predicted figure. With errors relative to the target, the fit would
    lie below the mean of times that scatter.
    """
    from scipy.optimize import nnls  # imported here, because it takes a second

    scale = np.maximum(np.sqrt((rows**2).mean(axis=0)), 1e-12)
    ridge = np.sqrt(RIDGE * len(rows)) * np.eye(rows.shape[1])
    nothing = np.zeros(rows.shape[1])
    tried = SLOWDOWNS if float(np.ptp(shares)) > 0.2 else SLOWDOWNS[:1]
    predicted = np.full_like(targets, targets.mean())
    found = np.zeros(rows.shape[1])
    slowdown = 1.0
    for _ in range(REWEIGHTED):
        weights = 1 / np.maximum(predicted, targets.mean() / 100)
        fits = []
        for tried_slowdown in tried:
            factor = (1 + (tried_slowdown - 1) * shares) * weights
            relative = np.concatenate([rows / scale * factor[:, None], ridge / targets.mean()])
            solution, error = nnls(relative, np.concatenate([targets * weights, nothing]))
            fits.append((float(error), float(tried_slowdown), solution / scale))
        _, slowdown, found = min(fits, key=lambda fit: (fit[0], fit[1]))
        predicted = rows @ found * (1 + (slowdown - 1) * shares)
    return [float(value) for value in found], slowdown


STEPS = 6
"""Number of steps of a probe. The first is not counted."""


def probe_settings(config: Config) -> Iterator[dict[str, Any]]:
    """Yield the keys of each probe: four occupancies of the instances, two sizes of windows, both sides one at a time
    and at once. Together they separate costs that always occur together in a single run."""
    places = config.groups_in_flight
    half = config.train.micro_batch_tokens // 2
    small = {"train.micro_batch_tokens": half} if half >= config.rollout.max_context else {}
    yield {"train.mode": "sync", "rollout.concurrency": 1}
    yield {"train.mode": "sync", "rollout.concurrency": 4 * places, **small}
    yield {"rollout.concurrency": places}
    yield {"rollout.concurrency": 2 * places, **small}


def probe_run(config: Config, keys: dict[str, Any], name: str) -> Config:
    """Return the config of a short run of the recipe with other keys, without checkpoints and evaluations."""
    rest = {
        "run.name": name,
        "train.steps": STEPS,
        "train.record": False,
        "train.warmup_steps": min(config.train.warmup_steps, STEPS),
        "checkpoint.every": 0,
        "evaluate.every": 0,
    }
    return change_config(config, keys | rest)


def measured_step_s(config: Config) -> float:
    """Return the median seconds of the steps of a finished run, without the first."""
    return float(median(line["step_s"] for line in list(read_lines(RunFolder(config.folder).steps))[1:]))
