"""Every advantage and loss in whole runs: it trains in sync, and a recorded periodic run replays in sync, the same bit
for bit.

A run pairs an advantage with a loss, so as many runs as there are of either cover all. Runs of a layout share their
processes.
"""

import math
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.losses import LOSSES
from engine.config import BATCH_SCOPE
from engine.errors import BadInput
from engine.run.files import read_lines
from support.parallel.runs import Job, run
from support.runs import base_settings, config_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]
PAIRS = [
    ("grpo", "grpo"),
    ("rloo", "dapo"),
    ("opo", "dr_grpo"),
    ("dr_grpo", "gspo"),
    ("grpo_passk", "cispo"),
    ("gpg", "gpg"),
]
BATCH_PAIRS = [("reinforce_plus_plus", "m2po"), ("reinforce_plus_plus_baseline", "bapo")]
STEPS = 20
FEW = 3
ALONE = "1 process"
FOUR = "TP2 x DP2"
LAYOUTS = {ALONE: {}, FOUR: {"parallel.tensor": 2, "parallel.data": 2}}
TINY = {
    "rollout.concurrency": 2,
    "rollout.max_new_tokens": 8,
    "train.prompts_per_step": 4,
    "train.micro_batch_tokens": 60,
    "weights.check_tokens": 4,
    "checkpoint.every": 0,
    "rollout.deterministic": True,
    "rollout.timeout_s": 300,
    "train.timeout_s": 300,
}


def settings_of(advantage, loss):
    return {
        "algorithm.advantage": advantage,
        "algorithm.loss": loss,
        "algorithm.kl_coef": 0 if advantage == "gpg" else 0.01,
    }


def name(advantage, loss, kind):
    return f"{advantage}-{loss}-{kind}"


@pytest.fixture(scope="module")
def runs_of(tiny_model, problems, tmp_path_factory):
    """The folder of all runs of a layout; they are made when they are first asked for."""

    @cache
    def made(layout):
        folder = tmp_path_factory.mktemp("runs")
        run(jobs_of(layout, base_settings(tiny_model, problems, folder) | TINY | LAYOUTS[layout]), timeout_s=1200)
        return folder  # about a minute on two quiet cores

    return made


def jobs_of(layout, base):
    jobs = []

    def add(pair, kind, mode, steps, replay=""):
        chosen = (
            base
            | settings_of(*pair)
            | {"run.name": name(*pair, kind), "train.mode": mode, "train.steps": steps, "train.record": kind == "live"}
        )
        jobs.append(Job(config_of(chosen), name(*pair, replay) if replay else ""))

    for pair in PAIRS:
        add(pair, "live", "periodic", STEPS)
        add(pair, "replayed", "sync", STEPS, replay="live")
        if pair == PAIRS[0] or layout == ALONE:
            add(pair, "sync", "sync", STEPS if pair == PAIRS[0] else FEW)
    for pair in BATCH_PAIRS if layout == ALONE else ():
        add(pair, "live", "sync", FEW)
        add(pair, "replayed", "sync", FEW, replay="live")
    return jobs


def lines_of(folder, run_name):
    return list(read_lines(folder / run_name / "steps.jsonl"))


def weights(folder, run_name):
    return load_file(folder / run_name / "policy/model.safetensors")


def difference(one, other):
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)


def test_all_are_here():
    assert {advantage for advantage, _ in PAIRS} == ADVANTAGES.keys() - set(BATCH_SCOPE)
    assert {loss for _, loss in PAIRS} == {name for name, loss in LOSSES.items() if loss.scope == "group"}
    assert {advantage for advantage, _ in BATCH_PAIRS} == set(BATCH_SCOPE)
    assert {loss for _, loss in BATCH_PAIRS} == {name for name, loss in LOSSES.items() if loss.scope == "batch"}


@pytest.mark.parametrize("pair", PAIRS + BATCH_PAIRS)
def test_exactly_those_of_batch_scope_are_refused_in_periodic(settings, pair):
    for key, chosen, batch in (("advantage", pair[0], pair in BATCH_PAIRS), ("loss", pair[1], pair in BATCH_PAIRS)):
        one = settings | {"train.mode": "periodic", "algorithm.kl_coef": 0, f"algorithm.{key}": chosen}
        if batch:
            with pytest.raises(
                BadInput, match=f"algorithm.{key} = .*{chosen}.* takes its statistics over the whole batch"
            ):
                config_of(one)
        else:
            config_of(one)


@pytest.mark.parametrize("pair", PAIRS + BATCH_PAIRS)
def test_each_trains_in_sync(runs_of, pair):
    lines = lines_of(runs_of(ALONE), name(*pair, "live" if pair in BATCH_PAIRS else "sync"))
    assert len(lines) >= FEW
    for line in lines:
        assert math.isfinite(line["loss"])
        assert math.isfinite(line["grad_norm"])
        assert line["max_ratio_gap"] <= 1e-3
    assert max(line["grad_norm"] for line in lines) > 0


@pytest.mark.parametrize(
    ("layout", "pair"),
    [
        *((ALONE, pair) for pair in PAIRS + BATCH_PAIRS),
        *(pytest.param(FOUR, pair, marks=pytest.mark.nightly) for pair in PAIRS),
    ],
)
def test_a_recorded_run_replays_in_sync_bit_for_bit(runs_of, tiny_model, layout, pair):
    """Asynchrony changes no number. The recorded runs of group scope are periodic ones."""
    runs = runs_of(layout)
    live, replayed = (name(*pair, kind) for kind in ("live", "replayed"))
    one = weights(runs, live)
    other = weights(runs, replayed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert len(lines_of(runs, live)) == (FEW if pair in BATCH_PAIRS else STEPS)
    for mine, theirs in zip(lines_of(runs, live), lines_of(runs, replayed), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    assert difference(one, load_file(tiny_model / "model.safetensors")) > 1e-3  # they went somewhere


@pytest.mark.parametrize("layout", [ALONE, pytest.param(FOUR, marks=pytest.mark.nightly)])
def test_what_order_of_arrival_changes_is_printed(runs_of, tiny_model, capsys, layout):
    """A periodic run and a sync run of the same seed:
    responses depend on prompt, seed and weights only, windows on arrival."""
    one, other = (weights(runs_of(layout), name(*PAIRS[0], kind)) for kind in ("live", "sync"))
    moved = difference(one, load_file(tiny_model / "model.safetensors"))
    apart = difference(one, other)
    with capsys.disabled():
        print(
            f"\n{layout}, periodic in order of arrival and sync, {PAIRS[0]}, {STEPS} steps: weights differ by at most "
            f"{apart:.3g}, training moved them by {moved:.3g}"
        )
    assert math.isfinite(apart)
    assert moved > 1e-3
