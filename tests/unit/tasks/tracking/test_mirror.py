"""What MLflow has of a run folder, in a real store that is away, refuses, or gets two writers."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import mlflow
import psutil
import pytest
import requests

from engine.config import Config, Data, Run, Tracking, Train
from engine.run.fence import Fence
from engine.run.files import append_line, append_lines, read_lines, seal
from engine.run.folder import RunFolder
from support.runs import ROOT
from tasks.fenced import write_fenced
from tasks.tracking import evaluations, mirror, retry, tracked_run


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Of all runs, since a store takes seconds to make."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def config(output, request):
    return Config(
        run=Run(name=request.node.name.strip("]").replace("[", "-"), output=str(output)), train=Train(steps=5)
    )


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mirror, "EVERY_S", 0.05)
    monkeypatch.setattr(mirror, "AGAIN_S", 0.05)


def add_steps(config, *steps):
    for step in steps:
        append_line(config.folder / "steps.jsonl", {"step": step, "loss": step / 10})


def history(run_id, name="loss"):
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run_id, name)]


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Store:
    """MLflow's log_batch, which may be away: before it writes, or after. Other calls reach the store."""

    def __init__(self, monkeypatch):
        self.away = ""
        self.asked = 0
        here = mlflow.MlflowClient.log_batch

        def log_batch(client, *arguments, **more):
            self.asked += 1
            if self.away != "before":
                here(client, *arguments, **more)
            if self.away:
                raise ConnectionError("nobody there")

        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_an_absent_server_misses_is_written_once_when_it_is_back(config, quick, monkeypatch, capsys, when):
    """Also what was written although no answer came."""
    store = Store(monkeypatch)
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        until(lambda: history(run_id))
        store.away = when
        asked = store.asked
        add_steps(config, 1, 2)
        until(lambda: store.asked > asked + 2)
        store.away = ""
        add_steps(config, 3)
    assert history(run_id) == [(step, step / 10) for step in range(4)]
    told = capsys.readouterr().err
    assert told.count("does not take") == told.count("is answering again") == 1
    assert ": nobody there. The run continues" in told


def test_the_time_of_a_step_is_when_it_ended_also_after_an_outage(config):
    with tracked_run.track_run(config) as run_id:
        rows = [{"step": step, "loss": step / 10, "step_s": 2.0} for step in range(4)]
        append_lines(config.folder / "steps.jsonl", map(json.dumps, rows))
        now = time.time()
    points = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    assert [(now - point.timestamp / 1000) for point in points] == pytest.approx([6, 4, 2, 0], abs=1)


def test_what_is_missing_at_the_end_is_named(config, quick, monkeypatch, capsys):
    monkeypatch.setattr(tracked_run, "FLUSH_S", 0.2)
    store = Store(monkeypatch)
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        until(lambda: history(run_id))
        store.away = "before"
        add_steps(config, 1, 2, 3)
    told = capsys.readouterr().err
    assert "did not receive: metrics of step 1 to 3, " in told
    assert "steps.jsonl, the description. Everything is in the run folder." in told
    store.away = ""
    checkpoint = config.folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_SUCCESS.json").write_text(json.dumps(seal({"step": 3, "files": {}})))
    with tracked_run.track_run(config) as again:
        pass
    assert again == run_id
    assert history(run_id) == [(0, 0.0), (1, 0.1), (2, 0.2)], "3 is done again"


def test_what_is_refused_is_left_out_and_named_and_the_rest_goes_on(config, quick, capsys):
    with tracked_run.track_run(config) as run_id:
        append_line(config.folder / "steps.jsonl", {"step": 0, "no?such": 1.0})
        until(lambda: "refuses metrics of step 0: " in capsys.readouterr().err)
        add_steps(config, 1)
    told = capsys.readouterr().err
    assert "did not receive: metrics of step 0. Everything is in the run folder." in told
    assert history(run_id) == [(1, 0.1)]


@pytest.mark.parametrize(
    ("status", "pointless"), [(400, True), (401, True), (404, True), (408, False), (429, False), (500, False)]
)
def test_a_wrong_request_is_refused_and_an_overloaded_server_is_asked_again(status, pointless):
    away = requests.HTTPError("no", response=SimpleNamespace(status_code=status))
    assert retry.is_refused(away) == pointless
    codes = mlflow.exceptions.ERROR_CODE_TO_HTTP_STATUS
    for code in (code for code, number in codes.items() if number == status):
        refusal = mlflow.MlflowException("no", error_code=mlflow.protos.databricks_pb2.ErrorCode.Value(code))
        assert retry.is_refused(refusal) == pointless


@pytest.mark.parametrize(
    "said",
    [
        "(sqlite3.IntegrityError) UNIQUE constraint failed: tags.key, tags.run_uuid",
        '(psycopg2.errors.UniqueViolation) duplicate key value violates unique constraint "tag_pk"',
    ],
    ids=["sqlite", "postgresql"],
)
def test_what_meets_another_writer_is_written_again(config, quick, monkeypatch, capsys, said):
    """As often as it meets one: more often than a pass tries."""
    here = mlflow.MlflowClient.set_experiment_tag
    conflicts = iter(range(len(retry.CONFLICT_S) + 2))
    monkeypatch.setattr(retry, "CONFLICT_S", (0.01,) * len(retry.CONFLICT_S))

    def set_experiment_tag(client, *arguments):
        if next(conflicts, None) is not None:
            raise mlflow.MlflowException(said, error_code=mlflow.protos.databricks_pb2.BAD_REQUEST)
        here(client, *arguments)

    monkeypatch.setattr(mlflow.MlflowClient, "set_experiment_tag", set_experiment_tag)
    config = config.model_copy(update={"tracking": Tracking(experiment=config.run.name)})  # which has no tag yet
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
    told = capsys.readouterr().err
    assert next(conflicts, None) is None
    assert "refuses" not in told
    assert "did not receive" not in told
    assert "mlflow.note.content" in mlflow.get_run(run_id).data.tags


def test_an_experiment_that_another_run_makes_at_the_same_time_is_used(config, monkeypatch):
    """The other one makes it after this one has seen that there is none."""
    look = mlflow.get_experiment_by_name
    made = []

    def get_experiment_by_name(name):
        found = look(name)
        if not made:
            made.append(mlflow.create_experiment(name))
        return found

    monkeypatch.setattr(mlflow, "get_experiment_by_name", get_experiment_by_name)
    config = config.model_copy(update={"tracking": Tracking(experiment="made at once")})
    with tracked_run.track_run(config) as run_id:
        pass
    assert mlflow.get_run(run_id).info.experiment_id == made[0]


def test_no_error_of_the_system_ends_the_mirror(config, quick, monkeypatch):
    with tracked_run.track_run(config) as run_id:
        monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc/none")  # psutil can't read the machine's load
        time.sleep(0.5)
        add_steps(config, 0)
        until(lambda: history(run_id))
        monkeypatch.undo()


def test_a_damaged_file_neither_ends_the_mirror_nor_changes_how_the_run_ended(config, quick, monkeypatch, capsys):
    monkeypatch.setattr(tracked_run, "FLUSH_S", 0.2)
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        until(lambda: history(run_id))
        with (config.folder / "evaluations.jsonl").open("a") as file:
            file.write("\0\0\0\n")
        add_steps(config, 1)
        time.sleep(0.5)
    assert "evaluations.jsonl, line 1: it is damaged" in capsys.readouterr().err.splitlines()[-1]
    assert mlflow.get_run(run_id).info.status == "FINISHED"


def test_a_server_that_hangs_does_not_hold_up_the_end(config, quick, monkeypatch):
    monkeypatch.setattr(tracked_run, "FLUSH_S", 0.2)
    hang = threading.Event()
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        until(lambda: history(run_id))
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: hang.wait(30))
        add_steps(config, 1)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    hang.set()


def test_a_process_that_was_taken_over_writes_no_step(config, quick):
    folder = RunFolder(config.folder)
    folder.path.mkdir()
    with write_fenced(folder), tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        until(lambda: history(run_id))
        Fence.begin_attempt(folder.path, "flow")
        add_steps(config, 1)
    assert history(run_id) == [(0, 0.0)]


def test_two_processes_that_mirror_the_same_evaluations_leave_each_once(config):
    (config.folder / "evaluations").mkdir(parents=True)
    # the same step twice, with other settings; the third is the second again
    for value, table in ((0.25, "a"), (0.5, "b"), (0.75, "b")):
        row = {"step": 0, "weight_version": 0, "benchmark": "sums", "problems": 2, "samples": 1, "avg_at_k": value}
        append_line(config.folder / f"evaluations/{table}.jsonl", {"prompt_id": "x", "mean": value})
        row |= {"ci_low": 0.1, "ci_high": 0.9, "table": f"evaluations/{table}.jsonl"}
        append_line(config.folder / "evaluations.jsonl", row)
    with tracked_run.track_run(config) as run_id:
        for later in range(2):
            evaluations.log_finished(config)
            for table in (config.folder / "evaluations").iterdir():  # as in a copy of the run folder
                os.utime(table, (later, later))
    assert sorted(history(run_id, "sums/avg_at_k")) == [(0, 0.25), (0, 0.5)]


def test_an_evaluation_whose_table_was_deleted_while_mlflow_was_away_has_its_figures(config):
    config.folder.mkdir(parents=True)
    row = {"step": 0, "weight_version": 0, "benchmark": "sums", "problems": 2, "samples": 1, "avg_at_k": 0.5}
    append_line(config.folder / "evaluations.jsonl", row | {"ci_low": 0.1, "ci_high": 0.9, "table": "evaluations/a"})
    with tracked_run.track_run(config) as run_id:
        pass
    assert history(run_id, "sums/avg_at_k") == [(0, 0.5)]


def test_samples_that_are_deleted_after_they_were_logged_are_not_missed(config):
    """Of a run that no thread of its own follows: two mirrors would write the same tags."""
    tracked_run.find_run(config)
    folder = RunFolder(config.folder)
    folder.create(config, resume=True)
    own = mirror.Mirror(tracked_run.create_run(config), config, {})
    folder.add_samples(0, [])
    own.push(whole=False)
    assert own.lost == []
    folder.samples_of(0).unlink()
    own.push(whole=False)
    assert own.lost == []
    mlflow.end_run()


def test_a_long_parameter_is_cut_and_says_so():
    assert mirror.cut_parameter("x" * 6000) == "x" * 6000
    short = mirror.cut_parameter("x" * 6001)
    assert len(short) == 6000
    assert short.endswith("xxx ... (6001 characters; complete in config.toml)")


def test_a_parameter_has_no_control_characters(output):
    config = Config(run=Run(name="escapes", output=str(output)), data=Data(prompt_template="\x1b[2J{problem}"))
    with tracked_run.track_run(config) as run_id:
        pass
    assert mlflow.get_run(run_id).data.params["data.prompt_template"] == r"\x1b[2J{problem}"


def test_each_of_several_sets_is_a_data_set_of_its_own(output):
    sets = {name: output / f"{name}.jsonl" for name in ("sums", "words, old")}
    for file in sets.values():
        file.write_text("{}\n")
    hashes = {"version": "ab" * 32, "content_hash": "cd" * 32, "rows": 2}
    found = {
        "train": {"source": f"{sets['sums']}, team/maths@main (held out 0.1)", **hashes},
        "heldout": {"source": str(sets["words, old"]), **hashes},
    }
    config = Config(run=Run(name="sets", output=str(output)))
    with tracked_run.track_run(config) as run_id:
        mirror.log_datasets(mlflow.MlflowClient(), run_id, found)
    logged = {one.dataset.name: one.dataset.source for one in mlflow.get_run(run_id).inputs.dataset_inputs}
    assert len(logged) == 3
    assert str(sets["sums"]) in logged["sums.jsonl (held out 0.1)"]
    assert "team/maths" in next(source for name, source in logged.items() if "maths" in name)
    assert str(sets["words, old"]) in logged["words, old.jsonl"]


def test_sets_whose_files_are_called_alike_are_all_there_and_there_may_be_many(output):
    """The names of all together are longer than a path can be."""
    files = [output / f"{'part' * 20}-{number}/train.jsonl" for number in range(40)]
    for file in files:
        file.parent.mkdir()
        file.write_text("{}\n")
    hashes = {"version": "ab" * 32, "content_hash": "cd" * 32, "rows": 2}
    found = {"train": {"source": ", ".join(map(str, files)), **hashes}, "heldout": {"source": str(files[0]), **hashes}}
    config = Config(run=Run(name="alike", output=str(output)))
    with tracked_run.track_run(config) as run_id:
        mirror.log_datasets(mlflow.MlflowClient(), run_id, found)
    logged = {one.dataset.name for one in mlflow.get_run(run_id).inputs.dataset_inputs}
    assert logged == {*map(str, files), "train.jsonl"}


@pytest.fixture(scope="module")
def run(output):
    """A tracked run with files in its folder, then resumed with other settings."""
    model = output / "base.model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config(run=Run(name="files", output=str(output)), data=Data(train="d" * 7000), train=Train(steps=40))
    with tracked_run.track_run(config):
        folder = RunFolder(config.folder)
        folder.create(config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})}), False)
        for step in range(4):
            (folder.responses / f"step-{step:06d}.jsonl").write_text("{}\n")
        (folder.path / "timeline.html").write_text("<html>")
    with tracked_run.track_run(config.model_copy(update={"train": Train(steps=50)})) as run_id:
        pass
    return mlflow.get_run(run_id)


def test_the_run_folders_files_and_every_other_steps_responses_become_artifacts(run):
    client = mlflow.MlflowClient()
    assert {item.path for item in client.list_artifacts(run.info.run_id)} >= {"timeline.html", "responses"}
    samples = {item.path for item in client.list_artifacts(run.info.run_id, "responses")}
    assert samples == {"responses/step-000000.jsonl", "responses/step-000002.jsonl"}, "40 steps: every second"


def test_parameters_keep_what_the_run_began_with_and_tags_say_what_changed(run):
    assert run.data.params["train.steps"] == "40"
    assert run.data.tags["changed.train.steps"] == "50"
    assert len(run.data.params["data.train"]) == 6000
    assert "changed.data.train" not in run.data.tags


def test_the_machines_load_is_sampled(run):
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 100


def test_the_base_model_is_an_input_once(run):
    assert len(run.inputs.model_inputs) == 1
    model = mlflow.MlflowClient().get_logged_model(run.inputs.model_inputs[0].model_id)
    assert model.params["path"].endswith("base.model")
    assert len(model.params["content_hash"]) == 64


def test_where_to_look(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert " ui --backend-store-uri sqlite:///" in tracked_run.ui_command(Config())
    assert tracked_run.ui_command(Config(tracking=Tracking(uri="http://tracker:5000"))) == "http://tracker:5000"


ATTEMPT = """
import json, sys, time
from engine.config import Config, Run
from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import append_line, seal
from engine.run.folder import RunFolder
from tasks.tracking import mirror, tracked_run

output, attempt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mirror.EVERY_S = 0.01
config = Config(run=Run(name="killed", output=output))
folder = RunFolder(config.folder)
with tracked_run.track_run(config):
    print("tracked", flush=True)
    checkpoint = latest_checkpoint(folder.checkpoints)
    first = 0 if checkpoint is None else step_of(checkpoint)
    folder.cut_steps(first)
    (folder.path / "evaluations").mkdir(exist_ok=True)
    for step in range(first, steps):
        append_line(folder.steps, {"step": step, "loss": attempt + step / 100, "reward": 1.0})
        if step % 3 == 2:
            there = folder.checkpoints / f"step-{step + 1:06d}"
            there.mkdir(parents=True, exist_ok=True)
            (there / "_SUCCESS.json").write_text(json.dumps(seal({"step": step + 1, "files": {}})))
            row = {"step": step, "weight_version": step, "benchmark": "b", "problems": 1, "samples": 1}
            row |= {"avg_at_k": 0.5, "ci_low": 0.1, "ci_high": 0.9, "table": f"evaluations/{attempt}-{step}.jsonl"}
            append_line(folder.path / row["table"], {"prompt_id": "x", "mean": 0.5})
            append_line(folder.evaluations, row)
        time.sleep(0.05)
"""


@pytest.mark.faults
def test_each_figure_is_there_once_after_kills_at_any_moment(output):
    chance = random.Random(3)
    for attempt in range(3):
        command = [sys.executable, "-c", ATTEMPT, str(output), str(attempt), "60"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout.readline() == "tracked\n"
            if attempt < 2:
                time.sleep(chance.uniform(0.1, 1.5))
                child.kill()
    assert child.returncode == 0
    folder = RunFolder(output / "killed")
    rows = {row["step"]: row["loss"] for row in read_lines(folder.steps)}
    mlflow.set_tracking_uri(f"sqlite:///{output / 'mlflow.db'}")
    run = mlflow.get_run((folder.path / tracked_run.RUN_ID).read_text())
    there = history(run.info.run_id)
    assert sorted(step for step, _ in there) == sorted(step for step, _ in history(run.info.run_id, "reward"))
    assert sorted(step for step, _ in there) == list(range(60)) == list(rows)
    redone = [step for step, value in sorted(there) if rows[step] != value]
    assert run.data.tags.get(mirror.REDONE, "") == ", ".join(map(str, redone))
    evaluated = [row["step"] for row in read_lines(folder.evaluations)]
    assert sorted(step for step, _ in history(run.info.run_id, "b/avg_at_k")) == sorted(evaluated)
    assert run.info.status == "FINISHED"
