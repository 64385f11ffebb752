"""A run is measured, planned anew, and its plan runs."""

import pytest

from engine.config.recipe import load_config
from engine.tools.planner.calibration import measured_step_s
from support.runs import config_of
from tasks.commands.plan import make_plan, measure_probes


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_recipe_is_measured_by_probes_and_its_best_settings_are_tried(settings, tmp_path, capsys):
    config = config_of(settings | {"run.name": "mine", "rollout.concurrency": 2, "train.prompts_per_step": 12})
    runs = measure_probes(config)
    assert runs == [str(tmp_path / f"mine-measure-{number}") for number in (1, 2, 3, 4)]
    out = tmp_path / "plan.toml"
    make_plan(config, runs, count=0, kind="", lengths="", out=out, autotune=True)
    printed = capsys.readouterr().out
    tuned = [tmp_path / f"mine-tune-{number}" for number in (1, 2, 3)]
    seconds = {
        measured_step_s(load_config(folder / "config.toml")): load_config(folder / "config.toml") for folder in tuned
    }
    assert printed.count("s measured") == 3
    fastest = seconds[min(seconds)]
    best = load_config(out)
    for table, name in (("rollout", "concurrency"), ("train", "micro_batch_tokens"), ("train", "mode")):
        assert getattr(getattr(best, table), name) == getattr(getattr(fastest, table), name)
