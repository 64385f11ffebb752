"""Searches the settings of a run on a number of devices: many by a bound, the best of them by simulation."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from engine.config import Config
from engine.config.placing import count_devices
from engine.config.tree import usable_cores
from engine.errors import BadInput
from engine.model.shape import ModelShape, check_layout
from engine.tools.dry_run import plan_run
from engine.tools.planner.costs import Costs, RowSize
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import Simulated, simulate_run

SIMULATED = 50
"""Number of settings that are simulated: those with the best bounds."""
ON_POLICY = ("sync", "periodic")
"""The modes among which a search chooses. Any other mode is searched only if it is the configuration's own."""
POWERS = (1, 2, 4, 8, 16, 32, 64)
SPARING: tuple[dict[str, Any], ...] = (
    {"train.recompute": "selective"},
    {"train.offload": True},
    {"train.recompute": "selective", "train.offload": True},
    {"train.recompute": True},
    {"train.recompute": True, "train.offload": True},
)
"""The ways to need less memory, the cheapest first. They are tried only if no setting fits without them."""
SEEDS = 2
"""Number of simulations of a setting, each with other groups. Their mean is used."""

CostsOf = Callable[[Config], Costs]
"""Returns the costs of a configuration's layout."""


@dataclass(frozen=True)
class Candidate:
    """A setting of the run."""

    changes: dict[str, Any]
    """The keys that differ from the recipe's, in the form of --set."""
    config: Config
    bound_s: float
    """Lower bound of the step time in seconds, from the rates alone."""

    def __str__(self) -> str:
        """The keys that the setting changes, in the form of --set."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.changes.items()) or "as the recipe"


@dataclass(frozen=True)
class Ranked:
    """A simulated setting."""

    candidate: Candidate
    step_s: float
    simulated: Simulated
    """The first of its simulations."""

    @property
    def devices(self) -> int:
        """Number of devices for training, scoring and rollouts."""
        return count_devices(self.candidate.config)


def search_settings(
    config: Config, shape: ModelShape, count: int, costs_of: CostsOf, lengths: Lengths, kept: int = SIMULATED
) -> tuple[list[Ranked], int]:
    """Return the best settings for at most `count` devices, fastest first, and the number of settings considered.

    If none fits into memory, the settings are tried with recomputation and offload too (SPARING). Raises BadInput if
    none fits then, with the last one's reason.
    """
    best: list[tuple[float, int, Candidate]] = []
    of_layout: dict[tuple[object, ...], tuple[float, int, Candidate]] = {}
    """On a CPU, the best of each layout: their bounds are too far from the times to leave a layout out."""
    looked = 0
    reason = "no layout fits that few devices"
    for keys in _each_setting(config, shape, count, best):
        looked += 1
        try:
            made = change_config(config, keys)
            check_layout(shape, made.parallel)
            bound = bound_s(made, costs_of(made), lengths)
            changes = {key: value for key, value in keys.items() if attrgetter(key)(config) != value}
            entry = (-bound, looked, Candidate(changes, made, bound))
            layout = core_layout(made)
            if on_cpu(config) and (layout not in of_layout or entry[0] > of_layout[layout][0]):
                of_layout[layout] = entry
            if len(best) == kept and -bound <= best[0][0]:
                continue
            if made.platform.device in ("cuda", "npu"):
                plan_run(made)  # rejects settings that do not fit into memory, among others
        except BadInput as error:
            reason = str(error)
            continue
        heapq.heappush(best, entry)
        if len(best) > kept:
            heapq.heappop(best)
    if not best:
        raise BadInput(f"--devices {count}: none of {looked} settings works: {reason}")
    chosen = {number: candidate for _, number, candidate in (*best, *of_layout.values())}
    ranked = [ranked_of(candidate, costs_of, lengths) for candidate in chosen.values()]
    return sorted(ranked, key=lambda one: one.step_s), looked


def _each_setting(config: Config, shape: ModelShape, count: int, found: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield each setting; on accelerators, as long as none was `found`, also with each of SPARING."""
    yield from candidate_settings(config, shape, count)
    if config.platform.device not in ("cuda", "npu"):
        return
    for keys in SPARING:
        if not found:
            yield from (setting | keys for setting in candidate_settings(config, shape, count))


def ranked_of(candidate: Candidate, costs_of: CostsOf, lengths: Lengths) -> Ranked:
    """Return the setting with its simulated time."""
    costs = costs_of(candidate.config)
    runs = [simulate_run(candidate.config, costs, lengths, seed) for seed in range(SEEDS)]
    return Ranked(candidate, sum(one.step_s for one in runs) / SEEDS, runs[0])


def change_config(config: Config, keys: dict[str, Any]) -> Config:
    """Return the configuration with some keys changed and checked. Raises BadInput."""
    tables = config.model_dump()
    for key, value in keys.items():
        table, name = key.split(".")
        tables[table][name] = value
    try:
        return Config.model_validate(tables)
    except ValueError as error:
        raise BadInput(str(error)) from None


def candidate_settings(config: Config, shape: ModelShape, count: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of each setting for at most `count` devices that uses as many of them as its layout can. On a
    CPU the layouts are those of cores that both sides share."""
    layouts = _core_layouts(config) if on_cpu(config) else _layouts(config, shape, count)
    budget = config.train.micro_batch_tokens
    budgets = [each for each in (budget // 2, budget, 2 * budget) if each >= config.rollout.max_context]
    places = sorted({max(1, config.groups_in_flight * factor // 2) for factor in (1, 2, 4, 8)})
    on_policy = config.train.mode in ON_POLICY
    modes = ON_POLICY if on_policy else (config.train.mode,)
    staged = (config.weights.staged,) if on_policy or on_cpu(config) else (False, True)
    ways = tuple(product(modes, staged))
    for layout, tokens, concurrency, (mode, stage) in product(layouts, budgets or [budget], places, ways):
        yield layout | {
            "train.micro_batch_tokens": tokens,
            "rollout.concurrency": concurrency,
            "train.mode": mode,
            "weights.staged": stage,
        }


def on_cpu(config: Config) -> bool:
    """Whether the devices of a plan are cores."""
    return config.platform.device in ("auto", "cpu")


def core_layout(config: Config) -> tuple[object, ...]:
    """What distinguishes the layouts of cores that both sides share."""
    return config.parallel.data, config.rollout.instances


def _core_layouts(config: Config) -> Iterator[dict[str, Any]]:
    """The recipe's own layout; if trainer and instances share the cores, also k replicas and k instances. The embedded
    engine stands for instances on cores, since "auto" may find a GPU."""
    yield {}
    train = config.train
    rollout = config.rollout
    parted = train.devices or rollout.devices or config.scorer_ranks or config.parallel.nodes > 1
    joined = config.dry_run.joining or not rollout.instances
    if parted or joined or rollout.engine != "embedded" or config.parallel.ranks > config.parallel.data:
        return
    cores = len(usable_cores())
    for count in POWERS:
        if count > cores or train.prompts_per_step % count:
            continue
        yield {"parallel.data": count, "rollout.instances": count}


def _layouts(config: Config, shape: ModelShape, count: int) -> Iterator[dict[str, Any]]:
    node = min(config.platform.devices_per_node, count)
    own = [size for size in POWERS if size <= node]
    stages = [size for size in POWERS if shape.layers % size == 0]
    joining = bool(config.dry_run.joining)
    for tensor, pipeline, context, wide in product(own, stages, own, own):
        replica = tensor * pipeline * context
        if shape.heads % tensor or shape.heads % wide or tensor * context > node:
            continue
        for data in range(1, count // replica + 1):
            left = count - replica * data
            instances = left // wide
            if not instances or config.train.prompts_per_step % data or left - instances * wide >= replica:
                continue
            yield {
                "parallel.tensor": tensor,
                "parallel.pipeline": pipeline,
                "parallel.context": context,
                "parallel.data": data,
                "parallel.sequence": tensor > 1,
                "rollout.tensor": wide,
                **({"dry_run.joining": instances} if joining else {"rollout.instances": instances}),
            }


def bound_s(config: Config, costs: Costs, lengths: Lengths) -> float:
    """Lower bound of the step time in seconds, assuming no waiting within training or generation: their sum in "sync",
    the larger one in the other modes."""
    rollout = config.rollout
    train = config.train
    size = rollout.group_size
    responses = train.prompts_per_step * size
    instances = rollout.instances + config.dry_run.joining
    active = min(config.slots, -(-responses // instances))
    context = active * (lengths.mean_prompt + lengths.mean / 2)
    decoding = responses * lengths.mean / active * costs.decode_s(active, context) / instances
    decoding += train.prompts_per_step * lengths.mean_prompt * costs.prefill_token / instances
    tokens = lengths.mean_group * train.prompts_per_step
    squares = responses * (lengths.mean_prompt + lengths.mean) ** 2
    rows = max(1, round(tokens / train.micro_batch_tokens))
    work = costs.window_s([RowSize(round(tokens / rows), squares / rows)] * rows, config.parallel.pipeline)
    training = work / config.parallel.data
    if train.mode == "sync":
        busy = decoding + training
    else:  # on shared cores, no less than the work of both sides on all of them
        theirs = config.parallel.ranks * config.trainer_threads
        ours = rollout.instances * config.instance_threads
        shared = (training * theirs + decoding * ours) / max(theirs + ours, len(usable_cores()))
        busy = max(decoding, training, shared * config.threads_per_core)
    return busy + costs.sync + costs.update * train.updates + costs.overhead
