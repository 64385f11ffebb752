"""Finds the best settings of a recipe from runs, or from arithmetic alone: the work of `metronome plan`.

Costs by arithmetic are for devices and layouts that were not measured. They are estimates: the efficiencies below are
assumptions. If a run was measured, only ratios between layouts of one device are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.config import Config
from engine.errors import BadInput, counted
from engine.model.shape import ModelShape
from engine.run.memory import BYTES, cheap_elements, frozen_copies, rank_parameters, total_parameters, whole_layers
from engine.tools.dry_run.model_shape import shape_of
from engine.tools.planner.calibration import MeasuredRun, fit_costs
from engine.tools.planner.costs import COPY, DEVICES, Costs, Device
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.search import (
    ON_POLICY,
    SIMULATED,
    Candidate,
    CostsOf,
    Ranked,
    bound_s,
    change_config,
    on_cpu,
    ranked_of,
    search_settings,
)

TRAINING = 0.35
"""Share of the peak that matrix products reach in training (an assumption)."""
DECODING = 0.4
"""The same share in decoding."""
READING = 0.7
"""Share of the memory's bandwidth that decoding and the optimizer reach (an assumption)."""
LAUNCH_S = 5e-6
"""Seconds to launch a kernel."""
KERNELS = 72
"""Number of kernels in a layer's forward and backward pass (benchmarks/launches.py)."""
ALL_REDUCE_S = 2e-5
"""Minimum seconds of an all-reduce within a node."""
SYNC_S = 0.5
"""Seconds of a weight sync apart from its buckets."""
BUCKET_S = 0.012
"""Seconds of a bucket's messages: one to the orchestrator, one to the instances, one to their processes (an
assumption)."""


def prior_costs(shape: ModelShape, config: Config, device: Device) -> Costs:
    """Return the costs of the layout by arithmetic. All figures are for one instance and one replica group of the
    trainer."""
    parallel = config.parallel
    total = total_parameters(shape)
    active = total - _inactive(shape)
    again = whole_layers(config.train.recompute, shape.layers // parallel.pipeline) * parallel.pipeline / shape.layers
    passes = 6 + 2 * frozen_copies(config) + 2 * again
    size = BYTES[config.train.dtype]
    heads = shape.heads * shape.head_dim
    shared = parallel.tensor * parallel.context
    tensor = config.rollout.tensor
    stage = rank_parameters(shape, parallel, 0).total
    split = parallel.data if config.train.distributed_optimizer else 1
    # two all-reduces in each layer's forward pass and two in its backward pass, of a token's hidden state
    crossing = 4 * shape.layers * shape.hidden * size * 2 * (parallel.tensor - 1) / parallel.tensor
    exchanged = crossing / device.to_others(parallel.tensor)
    network = config.platform.network_gbps * 1e9 / 8
    reduced = 4 * stage * 2 * (parallel.data - 1) / parallel.data / network
    copies = frozen_copies(config) * size * stage / COPY if config.train.offload else 0.0
    cheap = shape.layers * cheap_elements(shape, parallel) if config.train.recompute == "selective" else 0
    return Costs(
        decode_step=total * 2 / tensor / (device.bandwidth * READING)
        + 2 * shape.layers * ALL_REDUCE_S * (tensor > 1)
        + shape.layers * LAUNCH_S,
        decode_response=2 * active / tensor / (device.flops * DECODING),
        decode_context=4 * shape.layers * shape.kv_heads * shape.head_dim / tensor / (device.bandwidth * READING),
        prefill_token=2 * active / tensor / (device.flops * DECODING),
        window=KERNELS * LAUNCH_S + copies,
        micro_batch=shape.layers * KERNELS * LAUNCH_S * (1 + frozen_copies(config) / 3),
        token=passes * active / shared / (device.flops * TRAINING)
        + exchanged / parallel.context
        + 6 * cheap / parallel.context / (device.bandwidth * READING),
        # scores and values of half of the keys; the backward pass is twice the work of the forward pass
        square=passes / 2 * 2 * shape.layers * heads / shared / (device.flops * TRAINING),
        update=reduced + 28 * stage / split / (device.bandwidth * READING),
        sync=SYNC_S + transfer_seconds(config, 2 * total),
        orchestrator_token=1e-6,
        source=f"prior, {device.name}",
    )


def transfer_seconds(config: Config, nbytes: float) -> float:
    """Return the seconds to send weights of so many bytes: the network's, below which nothing can get, and those of the
    buckets' messages. Each bucket is verified and loaded while the next one arrives."""
    buckets = math.ceil(nbytes / config.weights.bucket_bytes)
    return buckets * BUCKET_S + nbytes / (config.platform.network_gbps * 1e9 / 8)


def _inactive(shape: ModelShape) -> int:
    """Number of parameters that a token does not use: embeddings, and the experts to which it is not sent."""
    embedding = shape.vocabulary * shape.hidden
    if shape.experts is None:
        return embedding
    idle = shape.experts.count - shape.experts.per_token
    return embedding + len(shape.experts.layers) * idle * 3 * shape.hidden * shape.experts.intermediate


def scale_costs(measured: Costs, was: Costs, now: Costs) -> Costs:
    """Return measured costs for another layout: each coefficient × its prior there ÷ its prior in the measured layout.
    Coefficients whose prior is 0 are kept. To a window's cost, the copies of `train.offload` are added."""
    changed = {}
    for name, value in vars(measured).items():
        before = getattr(was, name)
        after = getattr(now, name)
        if isinstance(value, float) and before and after and name != "orchestrator_token":
            changed[name] = value + after - before if name == "window" else value * after / before
    return replace(measured, **changed, source=f"{measured.source}, scaled by {now.source}")


def on_cores(measured: Costs, was: Config, now: Config) -> Costs:
    """Return costs that were measured on a CPU for other numbers of cores. The time of a computation is inversely
    proportional to the threads. With k threads on a core, trainer and instances take k times as long while both
    compute."""
    training = was.trainer_threads / now.trainer_threads
    sampling = was.instance_threads / now.instance_threads
    crowded = now.threads_per_core / was.threads_per_core
    if training == sampling == crowded == 1:
        return measured
    return replace(
        measured.slowed(sampling, training),
        update=measured.update * training,
        train_slowdown=max(1.0, measured.train_slowdown * crowded),
        rollout_slowdown=max(1.0, measured.rollout_slowdown * crowded),
        source=f"{measured.source}, scaled by the number of cores",
    )


SENSITIVITY = (
    ("responses half as long", 0.5, 1.0, 1.0),
    ("responses twice as long", 2.0, 1.0, 1.0),
    ("instances 20 % slower", 1.0, 1.2, 1.0),
    ("instances 20 % faster", 1.0, 0.8, 1.0),
    ("trainer 20 % slower", 1.0, 1.0, 1.2),
    ("trainer 20 % faster", 1.0, 1.0, 0.8),
)
"""Changes with which a plan is tried: (name, factor of lengths, of decoding, of training)."""
OFF_POLICY = ("one_step_off", "bounded")
"""The other modes, which a plan shows apart."""
COMPARED = 5
"""Number of the best settings that are tried with each change."""


@dataclass(frozen=True)
class StepModel:
    """The input of a plan."""

    config: Config
    shape: ModelShape
    costs_of: CostsOf
    lengths: Lengths
    assumptions: dict[str, str]
    """Each assumption of the plan, with its source."""


@dataclass(frozen=True)
class Planned:
    """The result of a search."""

    model: StepModel
    today: Ranked
    """The recipe as it is."""
    best: list[Ranked]
    """The best settings, fastest first."""
    looked: int
    """Number of settings that were considered."""


@dataclass(frozen=True)
class Sensitivity:
    """How the plan would change under another assumption."""

    name: str
    today: Ranked
    """The unchanged recipe, under that assumption."""
    chosen: Ranked
    """The setting that the plan chose, under that assumption."""
    best: Ranked
    """The fastest of the plan's few best settings, under that assumption."""

    @property
    def gain(self) -> float:
        """The time of the chosen setting divided by that of the best one."""
        return self.chosen.step_s / self.best.step_s


def measured_model(config: Config, runs: Sequence[MeasuredRun], device: Device | None) -> StepModel:
    """Return the model of a recipe from runs of it. `device`: for layouts that were not run; None on a CPU.

    Raises BadInput for runs of another model, and for other layouts of accelerators if no device is given.
    """
    shape, _ = shape_of(config.model.path)
    alike: dict[tuple[object, ...], list[MeasuredRun]] = {}
    for run in runs:
        if shape_of(run.config.model.path)[0] != shape:
            raise BadInput(f"--from {run.where}: a run of {run.config.model.path}, the recipe has {config.model.path}")
        alike.setdefault(_layout(run.config), []).append(run)
    measured = {layout: (these[0].config, fit_costs(these)) for layout, these in alike.items()}
    first, *_ = measured.values()

    def costs_of(wanted: Config) -> Costs:
        theirs, costs = measured.get(_layout(wanted), first)
        if on_cpu(wanted):
            return on_cores(costs, theirs, wanted)
        if _layout(wanted) in measured:
            return costs
        if device is None:
            raise BadInput(
                "these runs have another layout (parallel, rollout.tensor): give the device they ran on with "
                f"--device, one of {', '.join(DEVICES)}"
            )
        return scale_costs(costs, prior_costs(shape, theirs, device), prior_costs(shape, wanted, device))

    groups = tuple(group for run in runs for group in Lengths.of_run(run.spans).groups)
    names = ", ".join(run.where for run in runs)
    lengths = Lengths(groups, f"{counted(len(groups), 'group')} of {names}")
    return StepModel(
        config=config,
        shape=shape,
        costs_of=costs_of,
        lengths=lengths,
        assumptions={"lengths": lengths.source, **_told(costs_of(config))},
    )


def prior_model(config: Config, device: Device, lengths: Lengths) -> StepModel:
    """Return the model of a recipe that was not run, by arithmetic alone."""
    shape, source = shape_of(config.model.path)
    costs = prior_costs(shape, config, device)
    return StepModel(
        config=config,
        shape=shape,
        costs_of=lambda wanted: prior_costs(shape, wanted, device),
        lengths=lengths,
        assumptions={"model": source, "lengths": f"{lengths.source} (given)", **_told(costs)},
    )


def find_plan(model: StepModel, count: int, kept: int = SIMULATED) -> Planned:
    """Return the best settings on at most `count` devices. `kept`: the number of settings that are simulated."""
    config = model.config
    if not config.rollout.instances + config.dry_run.joining:
        raise BadInput("rollout.instances = 0: a plan needs at least one instance; set it, or dry_run.joining")
    best, looked = search_settings(
        config, model.shape, count, costs_of=model.costs_of, lengths=model.lengths, kept=kept
    )
    today = Candidate({}, config, bound_s(config, model.costs_of(config), model.lengths))
    return Planned(model, ranked_of(today, model.costs_of, model.lengths), best, looked)


def best_off_policy(plan: Planned, count: int) -> Iterator[tuple[str, Ranked | str]]:
    """Yield each mode that is not on-policy, with its best setting on at most `count` devices, or with the reason why
    it has none. A plan never chooses them: they train on responses of older weights. Nothing for a recipe that is in
    such a mode itself."""
    config = plan.model.config
    for mode in OFF_POLICY if config.train.mode in ON_POLICY else ():
        try:
            found = find_plan(replace(plan.model, config=change_config(config, {"train.mode": mode})), count, COMPARED)
        except BadInput as error:
            yield mode, str(error)
            continue
        best = found.best[0]
        yield (
            mode,
            replace(best, candidate=replace(best.candidate, changes={"train.mode": mode, **best.candidate.changes})),
        )


def plan_sensitivity(plan: Planned) -> Iterator[Sensitivity]:
    """Yield the effect of each change in SENSITIVITY."""
    for name, longer, decoding, training in SENSITIVITY:
        lengths = plan.model.lengths.scaled(longer, plan.model.config.rollout.max_new_tokens)

        def costs_of(config: Config, decoding: float = decoding, training: float = training) -> Costs:
            return plan.model.costs_of(config).slowed(decoding, training)

        tried = [ranked_of(one.candidate, costs_of, lengths) for one in plan.best[:COMPARED]]
        yield Sensitivity(
            name=name,
            today=ranked_of(plan.today.candidate, costs_of, lengths),
            chosen=tried[0],
            best=min(tried, key=lambda one: one.step_s),
        )


def _layout(config: Config) -> tuple[object, ...]:
    parallel = config.parallel
    return (
        *(parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.sequence),
        config.rollout.tensor,
        config.train.dtype,
        *(() if on_cpu(config) else (config.train.recompute, config.train.offload)),
        *((tuple(config.train.devices), tuple(config.rollout.devices)) if on_cpu(config) else ()),
    )


def _told(costs: Costs) -> dict[str, str]:
    return {
        name: f"{value:.3g}{'' if name.endswith('slowdown') else ' s'} ({source})"
        for name, (value, source) in costs.figures().items()
    }
