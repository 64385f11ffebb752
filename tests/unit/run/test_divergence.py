"""When a training has diverged, and when it has only had a bad step or a full success."""

import math

import pytest

from engine.run.divergence import find_divergence

FINE = {"reward_mean": 0.5, "entropy": 0.15, "loss": 0.1, "grad_norm": 0.2, "kl": 0.01, "old_ratio_max": 2.0}
FINE |= {"max_ratio_gap": 3e-6, "learning_rate": 1.0}
RUNS = {
    "healthy": ([{}, {"reward_mean": 0.9, "entropy": 0.014, "kl": 0.03}], None),
    "a bad step": ([{}, {"reward_mean": 0.0}, {}], None),
    "nothing learned yet": ([{"reward_mean": 0.0, "kl": None}, {"reward_mean": 0.0, "kl": None}], None),
    "far away, and better": ([{}, {"reward_mean": 0.9, "kl": 3.0, "entropy": 1e-6}], None),
    "the quickstart at a rate of 1": (
        [{}, {"reward_mean": 0.0, "kl": 4.59, "old_ratio_max": 2e6}],
        "kl 4.59, old_ratio",
    ),
    "without a reference": ([{}, {}, {"reward_mean": 0.01, "kl": None, "entropy": 2e-42}], "entropy 0.15 → 2e-42"),
    "numerics": ([{}, {"reward_mean": 0.0, "max_ratio_gap": 7.0}], "max_ratio_gap 7"),
    "no number": ([{}, {"grad_norm": math.nan}], "grad_norm nan"),
    "at once": ([{"loss": math.inf, "reward_mean": 0.0}], "loss inf"),
}


@pytest.mark.parametrize(("changes", "sign"), RUNS.values(), ids=RUNS)
def test_a_run_has_diverged(changes, sign):
    rows = [{**FINE, **change, "step": step} for step, change in enumerate(changes)]
    found = find_divergence([*rows, {**FINE, "step": len(rows)}])
    assert found.step == (len(rows) - 1 if sign else None)
    said = found.describe()
    assert said.startswith("training diverged: lower train.learning_rate (1); at step") if sign else said == ""
    assert (sign or "") in said
