"""`metronome plan`: how many devices to use for rollouts and for training, in which layout and mode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import tomli_w

from engine.config import Config
from engine.config.keys import flatten_keys, nest_keys
from engine.config.placing import count_devices
from engine.config.recipe import HOME
from engine.errors import BadInput, counted
from engine.run.files import write_atomically
from engine.run.limits import checkpoint_size
from engine.run.memory import total_parameters
from engine.run.progress import format_size
from engine.tools.planner.calibration import measured_step_s, probe_run, probe_settings, read_run
from engine.tools.planner.costs import DEVICES
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.planning import (
    Planned,
    Sensitivity,
    best_off_policy,
    find_plan,
    measured_model,
    plan_sensitivity,
    prior_model,
)
from engine.tools.planner.search import Ranked, change_config, core_layout, on_cpu
from tasks.commands.compare import align_columns
from tasks.stages.orchestrator_process import run_training
from tasks.terminal import console

SHOWN = 8
"""Number of settings in the table."""
TUNED = 3
"""Number of settings that --autotune runs."""
OWN_KEYS = ("run.name", "run.seed", "run.dry")
"""Keys of a single run, which a recipe that --out writes does not have: it is for tonight and for tomorrow."""
NOISE = 1.01
"""Ratios of step times below this count as equal."""


def make_plan(
    config: Config,
    runs: Sequence[str],
    count: int,
    kind: str,
    lengths: str,
    out: Path | None = None,
    autotune: bool = False,
) -> None:
    """Print the best settings and what they rest on. Write the best as a recipe to `out`.

    runs: folders of runs of the recipe. count: number of devices; 0: as many as the recipe uses. kind: a key of
    DEVICES, which replaces the recipe's platform and memory, or empty. lengths: "MEAN,P99" tokens of a response, used
    without runs. autotune: run the best few for some steps each, and take the fastest. Raises BadInput.
    """
    given = config
    if kind and kind not in DEVICES:
        raise BadInput(f"--device {kind}: unknown; known are {', '.join(DEVICES)}")
    device = DEVICES.get(kind)
    if device is not None:
        config = change_config(config, {"platform.device": device.platform, "platform.memory_gib": device.memory_gib})
    if runs:
        model = measured_model(config, [read_run(Path(run)) for run in runs], device)
    elif device is None or not lengths:
        raise BadInput(
            "plan needs measurements or figures: --measure (four short runs of this recipe), --from RUN (a run of it), "
            f"or --device ({', '.join(DEVICES)}) and --lengths MEAN,P99 (tokens of a response)"
        )
    else:
        model = prior_model(config, device, _lengths(lengths, config))
    count = count or count_devices(config)
    plan = find_plan(model, count)
    changes = list(plan_sensitivity(plan))
    _print(plan, changes)
    _print_off_policy(plan, count)
    best = _tuned(config, plan) if autotune else plan.best[0]
    if out is not None:
        write_atomically(out, _recipe(given, plan, best))
        console.print_page(f"recipe: {out}")


def measure_probes(config: Config) -> list[str]:
    """Train the recipe's probes for a few steps each, and return their run folders. Raises the error of a probe that
    fails."""
    return [
        str(_run(config, keys, f"measure-{number}").folder) for number, keys in enumerate(probe_settings(config), 1)
    ]


def _tuned(config: Config, plan: Planned) -> Ranked:
    """Run the best settings for some steps each, and return the fastest."""
    found = {}
    for number, one in enumerate(plan.best[:TUNED], 1):
        found[measured_step_s(_run(config, one.candidate.changes, f"tune-{number}"))] = one
    rows = [
        [f"{seconds:.3g} s measured", f"{one.step_s:.3g} s planned", str(one.candidate)]
        for seconds, one in sorted(found.items(), key=lambda each: each[0])
    ]
    console.print_page(f"\n{align_columns(rows)}")
    return found[min(found)]


def _run(config: Config, keys: dict[str, Any], name: str) -> Config:
    if config.cluster.engine == "ray":
        raise BadInput('cluster.engine = "ray": --measure and --autotune try a recipe on one machine, without Ray')
    made = probe_run(config, keys, f"{config.run.name}-{name}")
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())
    with console.print_stage(name) as say:
        run_training(made)
        say(f"{measured_step_s(made):.3g} s a step: {settings}")
    return made


def _recipe(given: Config, plan: Planned, best: Ranked) -> str:
    """The text of a recipe with the keys of a setting that differ from the defaults, each with its reason. `given`: the
    settings that were planned."""
    flat = flatten_keys(best.candidate.config.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    flat = {key: _portable(value) for key, value in flat.items() if key not in OWN_KEYS}
    flat |= {key: attrgetter(key)(best.candidate.config) for key in best.candidate.changes}  # also back to a default
    faster = plan.today.step_s / best.step_s
    lines = [
        f"# By metronome plan: predicted {best.step_s:.3g} s a step, {faster:.2f} times as fast as the recipe,",
        f"# on {counted(best.devices, 'device')}, bound by {best.simulated.bound_by}. Each run gets its own name.",
    ]
    table = ""
    for line in tomli_w.dumps(nest_keys(flat, "the plan")).splitlines():
        if header := re.fullmatch(r"\[([\w.-]+)\]", line):
            table = f"{header[1]}."
        if key := re.match(r"[\w-]+(?= = )", line):
            lines.append(f"# {_reason(table + key[0], given, best)}")
        lines.append(line)
    return "\n".join([*lines, ""])


def _reason(key: str, given: Config, best: Ranked) -> str:
    if key in best.candidate.changes:
        return f"planned; the recipe has {json.dumps(attrgetter(key)(given))}"
    if key in ("platform.device", "platform.memory_gib") and attrgetter(key)(given) != attrgetter(key)(
        best.candidate.config
    ):
        return "of the device that is planned for (--device)"
    return "as the recipe"


def _portable(value: Any) -> Any:  # noqa: ANN401
    """Paths of files that ship, as recipes write them: found from any folder, on any machine."""
    if isinstance(value, list):
        return [_portable(one) for one in value]
    return value.removeprefix(f"{HOME}/") if isinstance(value, str) else value


def _whole_run(plan: Planned, changes: Sequence[Sensitivity]) -> Iterator[list[str]]:
    """The rows of a table of the whole run: of the recipe as it is, and of the best setting."""
    yield ["the whole run", "hours", "from", "to", "device-hours", "a checkpoint"]
    for name, one, field in (
        ("the recipe as it is", plan.today, "today"),
        ("the best setting", plan.best[0], "chosen"),
    ):
        config = one.candidate.config
        seconds = [one.step_s, *(getattr(change, field).step_s for change in changes)]
        hours = [step * config.train.steps / 3600 for step in (one.step_s, min(seconds), max(seconds))]
        yield [
            name,
            *(f"{each_h:.3g}" for each_h in hours),
            f"{hours[0] * one.devices:.3g}",
            format_size(checkpoint_size(config, total_parameters(plan.model.shape))),
        ]


def _lengths(text: str, config: Config) -> Lengths:
    try:
        mean, p99 = (float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--lengths {text}: give two numbers, mean and 99 % quantile, for example 2000,8000") from None
    return Lengths.drawn(mean, p99, min(512, config.rollout.max_context // 8), config.rollout.max_new_tokens)


def _shown(plan: Planned) -> list[Ranked]:
    """The best settings, and on a CPU the best of each further layout of the cores."""
    shown = plan.best[:SHOWN]
    for one in plan.best[SHOWN:] if on_cpu(plan.model.config) else ():
        if all(core_layout(one.candidate.config) != core_layout(other.candidate.config) for other in shown):
            shown.append(one)
    return shown


def _print(plan: Planned, changes: Sequence[Sensitivity]) -> None:
    today = plan.today
    columns = ["step", "× as fast", "devices", "bound by", "settings"]
    rows = [[f"{today.step_s:.3g} s", "1", str(today.devices), today.simulated.bound_by, "the recipe as it is"]]
    rows += [
        [
            f"{one.step_s:.3g} s",
            f"{today.step_s / one.step_s:.2f}",
            str(one.devices),
            one.simulated.bound_by,
            str(one.candidate),
        ]
        for one in _shown(plan)
    ]
    console.print_page(align_columns([columns, *rows]))
    console.print_page(
        f"\n{plan.looked:,} settings considered, {len(plan.best)} simulated. Best settings under other conditions:"
    )
    other = [
        [one.name, "the same" if one.gain < NOISE else f"{one.gain:.2f} times as fast: {one.best.candidate}"]
        for one in changes
    ]
    console.print_page(align_columns(other))
    console.print_page(f"\n{align_columns(list(_whole_run(plan, changes)))}")
    console.print_page("without start and evaluations; from and to: under the other conditions above")
    console.print_table("Assumptions", plan.model.assumptions)


def _print_off_policy(plan: Planned, count: int) -> None:
    rows = [
        [mode, best, "", ""]
        if isinstance(best, str)
        else [mode, f"{best.step_s:.3g} s", f"{plan.best[0].step_s / best.step_s:.2f}", str(best.candidate)]
        for mode, best in best_off_policy(plan, count)
    ]
    if rows:
        columns = ["off-policy", "step", "× the best above", "settings"]
        console.print_page(f"\n{align_columns([columns, *rows])}")
        console.print_page("never chosen by a plan: they train on responses of older weights (docs/modes.md)")
