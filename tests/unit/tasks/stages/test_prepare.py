import json

import mlflow
import pytest

from engine.config import Config, Run
from engine.config.recipe import load_config
from engine.data import prepared
from engine.data.problem_statistics import describe_report, read_report, record_data, recorded_problems, report_data
from tasks.stages.prepare import report_page
from tasks.tracking import tracked_run


@pytest.fixture
def config(tmp_path):
    rows = [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(60)]
    rows.append({"problem": "a | b", "answer": None})
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "heldout.json").write_text(json.dumps(rows[:3]))
    keys = {"data.train": tmp_path / "train.json", "data.heldout": tmp_path / "heldout.json", "run.output": tmp_path}
    return load_config(None, ["run.name=mine", *(f"{key}={value}" for key, value in keys.items())])


def test_the_report_is_that_of_the_sets_that_the_run_trains_on(config):
    found = record_data(config, prepared.prepare_problems(config))
    assert found["train"]["rows"] == len(prepared.training_problems(config).rows) == 57
    assert found["train"]["skipped"] == {"no answer": 1, "in an evaluation set": 3}
    assert (
        describe_report(found)
        == "57 problems of 5 characters (4-5), 3 held out; skipped 3 × in an evaluation set, 1 × no answer"
    )


def test_the_report_follows_a_file_that_changes_before_the_training(config):
    record_data(config, prepared.prepare_problems(config))
    with open(config.data.train) as file:
        rows = json.load(file)
    with open(config.data.train, "w") as file:
        json.dump([*rows, {"problem": "70+1=", "answer": "71"}], file)
    assert len(recorded_problems(config).rows) == read_report(config.folder)["train"]["rows"] == 58
    report = config.folder / "data.json"
    report.unlink()
    assert len(recorded_problems(config).rows) == 58  # the folder's own
    assert not report.exists()


def test_the_page_shows_figures_reasons_and_overlaps(config):
    text = report_page(report_data(prepared.prepare_problems(config)))
    assert "| rows | 57 | 3 |" in text
    assert "| problem_characters | min: 4, median: 5, max: 5 |" in text
    assert "train.json, row 1 |" in text
    assert "answer: no answer (found null" in text


def test_the_settings_of_the_rows_are_what_changes_them_and_nothing_else(config):
    def settings(*overrides):
        given = [f"data.train={config.data.train}", f"data.heldout={config.data.heldout}"]
        return prepared.problem_settings(load_config(None, [*given, *overrides]))

    base = settings()
    assert settings("train.steps=3", "run.seed=5", "evaluate.samples=2", "run.name=other") == base
    assert settings("reward.function=math") != base
    assert settings('reward.functions=[{function="math"}, {function="mine.py:f"}]') == settings("reward.function=math")
    assert settings("data.decontaminate=[]") != base
    assert settings("evaluate.benchmark=other.json") != base
    assert Config.model_validate(base).data == config.data
    before = prepared.file_hashes(config)
    with open(config.data.train, "a") as file:
        file.write("\n")
    after = prepared.file_hashes(config)
    assert {path for path in before if before[path] != after[path]} == {config.data.train}


def test_both_sets_are_inputs_of_the_mlflow_run(config):
    problems = prepared.prepare_problems(config)
    for _ in range(2):  # the second time it is resumed
        with tracked_run.track_run(
            config.model_copy(update={"run": Run(name="mine", output=config.run.output)})
        ) as run:
            found = record_data(config, problems)
    entries = mlflow.get_run(run).inputs.dataset_inputs
    assert len(entries) == 2
    inputs = {tag.value: entry for entry in entries for tag in entry.tags if tag.key.endswith("context")}
    assert set(inputs) == {"training", "evaluation"}
    assert inputs["training"].dataset.name == "train.json"
    assert inputs["training"].dataset.digest == found["train"]["version"][:32]
    assert {tag.key: tag.value for tag in inputs["training"].tags}["rows"] == "57"
    assert {tag.key: tag.value for tag in inputs["training"].tags}["version"] == found["train"]["version"]
