"""A run is measured, planned anew, and its plan runs."""

import json

import pytest

from engine.config.recipe import load_config
from engine.tools.planner.calibration import measured_step_s
from support.runs import config_of, launch
from tasks.commands.plan import make_plan, measure_probes


@pytest.mark.nightly
def test_a_run_its_plan_and_the_plans_run(settings, tmp_path, capsys):
    first = settings | {"run.name": "first", "train.mode": "periodic", "rollout.concurrency": 1, "train.steps": 4}
    code, output = launch(first, tmp_path)
    assert code == 0, output
    config = config_of(first)
    out = tmp_path / "plan.toml"
    make_plan(config, [str(tmp_path / "first")], count=0, kind="", lengths="", out=out, page=tmp_path / "page")
    printed = capsys.readouterr().out
    assert "the recipe as it is" in printed
    assert "settings considered" in printed
    assert f"measured: {tmp_path / 'first'}" in printed
    assert (tmp_path / "page/plan.html").is_file()
    assert "instance-0" in (tmp_path / "page/best/timeline.html").read_text()
    spans = [json.loads(line) for line in (tmp_path / "page/best/trace/simulated.jsonl").read_text().splitlines()]
    assert {"rollout", "train", "wait", "sync", "update"} <= {span["name"] for span in spans}
    best = load_config(out)
    changed = {"train.micro_batch_tokens", "rollout.concurrency", "train.mode"}
    for key in settings:
        if key not in changed:
            table, name = key.split(".")
            assert getattr(getattr(best, table), name) == getattr(getattr(config, table), name), key
    code, output = launch(
        {
            **settings,
            "run.name": "second",
            "train.steps": 2,
            "train.mode": best.train.mode,
            "rollout.concurrency": best.rollout.concurrency,
        },
        tmp_path,
    )
    assert code == 0, output


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
