"""The one list of stages: what is run for a policy, what is not repeated, and what training further repeats."""

from contextlib import nullcontext

import pytest

from engine.config import Config
from engine.run.folder import RunFolder
from flows import pipeline
from flows.pipeline import STAGES, run_stages, stages_for
from tasks.attempt import TRAIN, EnteredRun, RunStage, Stages


@pytest.fixture
def entered(tmp_path):
    """Enters the run with a number of steps, as each flow does."""

    def enter(steps):
        config = Config(run={"name": "night", "output": str(tmp_path)}, train={"steps": steps})
        RunFolder(config.folder).logs.mkdir(parents=True, exist_ok=True)
        return EnteredRun(
            config, lambda config: config.train.steps, Stages(RunFolder(config.folder)), registered="nights"
        )

    return enter


def test_a_stage_needs_stages_before_it():
    for number, stage in enumerate(STAGES):
        assert set(stage.needs) <= {one.name for one in STAGES[:number]}


def test_the_flow_that_trains_runs_the_part_of_the_list_that_an_announcement_needs():
    assert [stage.name for stage in stages_for("announce")] == ["base model", "train", "publish", "announce"]


def test_a_run_that_is_trained_further_is_published_evaluated_registered_and_announced_again(
    entered, monkeypatch, capsys
):
    done = []

    def counted(stage):
        return RunStage(stage.name, lambda run: done.append(stage.stored_name(run)) or "it", str, stage.needs)

    monkeypatch.setattr(pipeline, "STAGES", [stage if stage is TRAIN else counted(stage) for stage in STAGES])
    after = ["publish", "evaluate version {}", "register", "announce"]
    for steps, expected in (
        (2, ["prepare data", "base model", "encode", "convert", "evaluate version 0", *after]),
        (2, []),
        (4, after),
    ):
        done.clear()
        run = entered(steps)
        table = run_stages(pipeline.STAGES, nullcontext(run), lambda run: {"steps": str(run.finished.done["train"])})
        assert done == [name.format(steps) for name in expected]
        assert table == {"steps": str(steps)}
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(f"train        {steps} steps  [") for line in lines)
        assert any(line.startswith("evaluate     it  [") for line in lines)
