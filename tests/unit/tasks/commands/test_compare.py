"""Runs read from their folders and from MLflow, for the page and the table of `metronome compare`."""

import json
from pathlib import Path

import mlflow
import pytest

from engine.config import Config, Tracking, Train
from engine.config import Run as RunTable
from engine.errors import BadInput
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.tools.comparison import run_figures
from engine.tools.comparison.verdict import config_differences
from support.compared_runs import evaluation, step
from support.run_folders import add_line
from support.simulated_runs import config, simulated_run, with_model
from tasks.commands.compare import compare_runs, from_folder, from_mlflow
from tasks.tracking import tracked_run


def _fail_in_mlflow(config, ids):
    with tracked_run.track_run(config) as run_id:
        ids.append(run_id)
        add_line(config.folder / "steps.jsonl", **step(0))
        raise BadInput("by the test")


def test_a_failed_run_is_read_as_one_from_its_folder_and_from_mlflow(stored, tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_failure(BadInput("the reward raised:\n  line 3"))
    folder.steps.write_text(json.dumps(step(0)) + "\n")
    assert from_folder(tmp_path).failure == "the reward raised: line 3"
    config = Config(run=RunTable(name="run", output=str(tmp_path)), tracking=Tracking(uri=stored[2]))
    ids = []
    with pytest.raises(BadInput, match="by the test"):
        _fail_in_mlflow(config, ids)
    assert from_mlflow(ids[0], stored[2]).failure == "MLflow has it as FAILED"
    assert from_mlflow(stored[1], stored[2]).failure == ""


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same 12 steps in a run folder and in MLflow, with a redone step in the folder."""
    output = tmp_path_factory.mktemp("runs")
    uri = f"sqlite:///{output / 'mlflow.db'}"
    config = Config(run=RunTable(name="run", output=str(output)), train=Train(steps=12), tracking=Tracking(uri=uri))
    rows = [step(n, reward=n / 12, loss=0.1, versions_seen=[n], **{"reward/form": n / 24}) for n in range(12)]
    with tracked_run.track_run(config) as run_id:
        for row in rows:
            add_line(config.folder / "steps.jsonl", **row)
        (config.folder / "evaluations").mkdir()
        append_line(config.folder / "evaluations/b.jsonl", {"prompt_id": "x", "mean": 0.5})
        add_line(config.folder / "evaluations.jsonl", **evaluation(0.5, 0.4, 0.6, table="evaluations/b.jsonl"))
    artifacts = Path(mlflow.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    (artifacts / "evaluations.jsonl").unlink()  # as in a run that has not ended: the rows come from the metrics
    folder = output / "copied"
    folder.mkdir()
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:8], *rows[6:]]))
    (folder / "evaluations.jsonl").write_text(json.dumps(evaluation(0.5, 0.4, 0.6)) + "\n")
    from engine.run.folder import dump_config

    dump_config(config, folder / "config.toml")
    return folder, run_id, uri


def test_a_folder_and_an_mlflow_run_read_the_same(stored):
    folder, run_id, uri = stored
    one = from_folder(folder)
    other = from_mlflow(run_id, uri)
    assert config_differences([one, other]) == {}
    for key in ("reward_mean", "reward/form"):
        assert run_figures.figure_series(one, key) == run_figures.figure_series(other, key) != []
    assert run_figures.elapsed_seconds(one) == run_figures.elapsed_seconds(other)
    for key in ("avg_at_k", "ci_low", "ci_high", "step", "weight_version", "benchmark"):
        assert one.evaluations[0][key] == other.evaluations[0][key]


def test_compare_takes_both_and_says_what_it_found(stored, tmp_path):
    folder, run_id, uri = stored
    told = compare_runs([str(folder), run_id], tmp_path / "page.html", uri)
    assert told.splitlines()[1].split()[:3] == ["copied", "periodic", "12"]
    assert "with no visible difference" in told
    assert '"reward/form":[' in (tmp_path / "page.html").read_text()


def test_a_run_in_runs_is_named_as_in_status_and_watch(stored, tmp_path, monkeypatch):
    folder, run_id, uri = stored
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/mine").symlink_to(folder)
    (tmp_path / "mine").mkdir()  # of something else
    monkeypatch.chdir(tmp_path)
    assert compare_runs(["mine", run_id], Path("page.html"), uri).splitlines()[1].split()[0] == "copied"


def test_runs_with_a_trace_are_told_what_bound_their_steps(stored, tiny_model, tmp_path):
    slow = simulated_run(with_model(config("slow", tmp_path, "sync", concurrency=1), tiny_model), steps=6)
    told = compare_runs([str(slow), str(stored[0])], tmp_path / "page.html").splitlines()
    (line,) = told[told.index("Bound by:") + 1 : told.index("Bound by:") + 2]
    assert line.startswith("slow  rollout (")
    assert line.endswith(f"; metronome plan --from {slow} predicts other settings")
    assert not any(line.startswith("copied") for line in told[told.index("Bound by:") :])


def test_tables_of_evaluations_come_back_from_mlflow(stored, tmp_path):
    uri = stored[2]
    config = Config(run=RunTable(name="run", output=str(tmp_path)), tracking=Tracking(uri=uri))
    row = evaluation(0.5, 0.4, 0.6, table="evaluations/b.jsonl", pass_curve={"1": 0.5})
    with tracked_run.track_run(config) as run_id:
        (config.folder / "evaluations").mkdir()
        add_line(config.folder / "evaluations.jsonl", **row)
        (config.folder / "evaluations/b.jsonl").write_text(json.dumps({"prompt_id": "x", "mean": 0.5}) + "\n")
        add_line(config.folder / "steps.jsonl", **step(0))
    for found in (from_folder(config.folder), from_mlflow(run_id, uri)):
        assert [{**one, "ended_s": 0} for one in found.evaluations] == [{**row, "ended_s": 0}]
        assert found.tables == {"evaluations/b.jsonl": {"x": 0.5}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["FOLDER"], "at least two runs"),
        (["FOLDER", "FOLDER"], "given twice"),
        (["FOLDER", "nowhere"], "nowhere: neither a run folder, nor one's name in runs/, nor an MLflow run id"),
        (["FOLDER", "f" * 32], "can't be read from sqlite"),
        (["FOLDER", "EMPTY"], "no run with steps"),
    ],
)
def test_what_is_no_run_is_one_clear_error(stored, tmp_path, given, message):
    folder, _, uri = stored
    names = [one.replace("FOLDER", str(folder)).replace("EMPTY", str(tmp_path)) for one in given]
    with pytest.raises(BadInput, match=message):
        compare_runs(names, tmp_path / "page.html", uri)


def test_a_store_that_is_not_there_is_not_made(stored, tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        compare_runs([str(stored[0]), "f" * 32], tmp_path / "page.html", f"sqlite:///{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()


@pytest.fixture(autouse=True, scope="module")
def _store():
    before = mlflow.get_tracking_uri()
    yield
    tracked_run._use(before)  # MLflow's own function would set the environment for the tests that follow, too


def evaluated(folder, means, version):
    """The folder of a `metronome evaluate`."""
    (folder / "evaluations").mkdir(parents=True)
    for prompt_id, mean in means.items():
        append_line(folder / "evaluations/b.jsonl", {"prompt_id": prompt_id, "mean": mean})
    average = sum(means.values()) / len(means)
    row = evaluation(average, average - 0.1, average + 0.1, table="evaluations/b.jsonl")
    add_line(folder / "evaluations.jsonl", **row | {"step": version, "weight_version": version, "samples": 1})
    return str(folder)


def test_two_evaluations_are_compared_by_their_problems_and_need_no_steps(tmp_path):
    base = evaluated(tmp_path / "base", {f"p{n}": float(n < 2) for n in range(20)}, 0)
    tuned = evaluated(tmp_path / "tuned", {f"p{n}": float(n < 12) for n in range(20)}, 4)
    told = compare_runs([base, tuned], tmp_path / "page.html").splitlines()
    assert [line.split() for line in told[:3]] == [
        ["run", "b:", "accuracy"],
        ["base", "0.100", "[0.000,", "0.200]"],
        ["tuned", "0.600", "[0.500,", "0.700]"],
    ]
    assert told[4].startswith(
        "Evaluation on b: tuned was better (+0.500, 95% interval +0.260 to +0.740, paired over 20"
    )
    assert not (tmp_path / "page.html").exists()


def test_evaluations_on_different_benchmarks_are_not_compared(tmp_path):
    one = evaluated(tmp_path / "one", {"x": 1.0}, 0)
    other = evaluated(tmp_path / "other", {"x": 1.0}, 0)
    text = (tmp_path / "other/evaluations.jsonl").read_text()
    (tmp_path / "other/evaluations.jsonl").write_text(text.replace('"b"', '"c"'))
    with pytest.raises(BadInput, match="other and one have no benchmark in common: b; c"):
        compare_runs([one, other], tmp_path / "page.html")
