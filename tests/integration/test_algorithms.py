"""Every advantage and loss in whole runs: it trains in sync, and a recorded periodic run replays in sync, the same bit
for bit.

A run pairs an advantage with a loss, so as many runs as there are of either cover all. Runs of a layout share their
processes.
"""

import math
from functools import cache

import pytest
from safetensors.torch import load_file

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.losses import LOSSES
from engine.config import BATCH_SCOPE
from support.parallel.runs import Job, run
from support.runs import base_settings, config_of
from support.whole_runs import same, steps, weights

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

    def add(pair, kind, mode, count, replay=""):
        chosen = (
            base
            | settings_of(*pair)
            | {"run.name": name(*pair, kind), "train.mode": mode, "train.steps": count, "train.record": kind == "live"}
        )
        jobs.append(Job(config_of(chosen), name(*pair, replay) if replay else ""))

    for pair in PAIRS:
        add(pair, "live", "periodic", STEPS)
        add(pair, "replayed", "sync", STEPS, replay="live")
        if layout == ALONE:
            add(pair, "sync", "sync", FEW)
    for pair in BATCH_PAIRS if layout == ALONE else ():
        add(pair, "live", "sync", FEW)
        add(pair, "replayed", "sync", FEW, replay="live")
    return jobs


def difference(one, other):
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)


def test_all_are_here():
    assert {advantage for advantage, _ in PAIRS} == ADVANTAGES.keys() - set(BATCH_SCOPE)
    assert {loss for _, loss in PAIRS} == {name for name, loss in LOSSES.items() if loss.scope == "group"}
    assert {advantage for advantage, _ in BATCH_PAIRS} == set(BATCH_SCOPE)
    assert {loss for _, loss in BATCH_PAIRS} == {name for name, loss in LOSSES.items() if loss.scope == "batch"}


@pytest.mark.parametrize("pair", PAIRS + BATCH_PAIRS)
def test_each_trains_in_sync(runs_of, pair):
    lines = steps(runs_of(ALONE), name(*pair, "live" if pair in BATCH_PAIRS else "sync"))
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
    assert same(one, weights(runs, replayed))
    assert len(steps(runs, live)) == (FEW if pair in BATCH_PAIRS else STEPS)
    for mine, theirs in zip(steps(runs, live), steps(runs, replayed), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
    assert difference(one, load_file(tiny_model / "model.safetensors")) > 1e-3  # they went somewhere
