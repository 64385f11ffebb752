"""What MLflow has of a run folder, in a real store that is away, refuses, or gets two writers."""

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import mlflow
import psutil
import pytest
import requests
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from engine.config import Config, Data, Run, Tracking, Train
from engine.errors import BadInput
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from support.run_folders import add_line, newer_attempt
from support.runs import ROOT, wait_for
from tasks.attempt import write_fenced
from tasks.tracking import evaluations, mirror, tracked_run
from tasks.tracking import store as mlflow_store

EVALUATION = {"step": 0, "weight_version": 0, "benchmark": "sums", "problems": 2, "samples": 1, "avg_at_k": 0.5}
EVALUATION |= {"ci_low": 0.1, "ci_high": 0.9, "table": "evaluations/a.jsonl"}
HASHES = {"version": "ab" * 32, "content_hash": "cd" * 32, "rows": 2}


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
    monkeypatch.setattr(tracked_run, "CLOSE_S", 1.0)


def add_steps(config, *steps, **figures):
    for step in steps:
        add_line(config.folder / "steps.jsonl", **{"step": step, "loss": step / 10, "step_s": 1.0} | figures)


def history(run_id, name="loss"):
    return [(point.step, point.value) for point in mlflow.MlflowClient().get_metric_history(run_id, name)]


def count(output, run_id):
    """Number of rows that the store has of a run's figures, without the machine's load."""
    with closing(sqlite3.connect(output / "mlflow.db")) as store:
        query = "SELECT count(*) FROM metrics WHERE run_uuid = ? AND key NOT LIKE 'system/%'"
        return store.execute(query, (run_id,)).fetchone()[0]


class Store:
    """MLflow's log_batch, which may raise an error: before it writes, or after. Other calls reach the store."""

    def __init__(self, monkeypatch):
        self.when = ""
        self.error = ConnectionError("nobody there")
        self.asked = 0
        here = mlflow.MlflowClient.log_batch

        def log_batch(client, *arguments, **more):
            self.asked += 1
            if self.when != "before":
                here(client, *arguments, **more)
            if self.when:
                raise self.error

        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)


def test_what_was_written_although_no_answer_came_is_written_once(config, output, quick, monkeypatch, capsys):
    """tests/stack/test_tracking_outage.py has a server that is away."""
    store = Store(monkeypatch)
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        wait_for(lambda: history(run_id), "MLflow")
        store.when = "after"
        asked = store.asked
        add_steps(config, 1, 2)
        wait_for(lambda: store.asked > asked + 2, "MLflow")
        store.when = ""
        add_steps(config, 3)
    assert history(run_id) == [(step, step / 10) for step in range(4)]
    assert count(output, run_id) == 8
    told = capsys.readouterr().err
    assert told.count("does not take") == told.count("is answering again") == 1
    assert ": nobody there. The run continues" in told


def test_a_step_that_is_trained_again_has_the_figures_of_both_attempts_and_each_line_is_sent_once(config, output):
    """Step 2 is lost on its way to MLflow, the checkpoint is before step 3; then 3 and 4 are done again. The figures'
    times are those of the lines."""
    folder = RunFolder(config.folder)
    with tracked_run.track_run(config) as run_id:
        add_steps(config, *(0, 1, 3, 4))
    first = [row["ended_s"] for row in read_lines(folder.steps)]
    folder.cut_steps(2)
    add_steps(config, 2, 3)
    with tracked_run.track_run(config) as second:
        folder.cut_steps(3)
        add_steps(config, 3, 4, loss=10.0)
    assert second == run_id
    points = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    values = {}
    for point in sorted(points, key=lambda point: point.timestamp):
        values.setdefault(point.step, []).append(point.value)
    assert values == {0: [0.0], 1: [0.1], 2: [0.2], 3: [0.3, 0.3, 10.0], 4: [0.4, 10.0]}
    ended = [*first, *(row["ended_s"] for row in read_lines(folder.steps) if row["step"] > 1)]
    assert {round(at * 1000) for at in ended} <= {point.timestamp for point in points}
    for _ in range(2):
        with tracked_run.track_run(config):
            pass
    assert count(output, run_id) == 2 * len(points) == 16


def test_each_line_is_read_once_also_if_the_file_is_cut_and_a_half_written_one_later(tmp_path):
    folder = RunFolder(tmp_path)
    lines = mirror.NewLines(folder.steps)
    assert lines.read() == []
    for step in range(4):
        add_line(folder.steps, step=step)
    with folder.steps.open("a") as file:
        file.write('{"step": 4, "ended')
    assert [row["step"] for row in lines.read()] == [0, 1, 2, 3]
    with folder.steps.open("a") as file:
        file.write(f'_s": {time.time()}}}\n')
    assert [row["step"] for row in lines.read()] == [4]
    folder.cut_steps(2)
    add_line(folder.steps, step=2)
    assert [row["step"] for row in lines.read()] == [2]
    assert lines.read() == []


def test_a_batch_that_the_store_has_in_whole_or_in_part_is_kept_once(config, output):
    """That of the database: what a lost answer sends twice, and what an earlier process has sent of a line."""
    tracked_run.find_run(config)
    run_id = tracked_run.create_run(config).info.run_id
    mlflow.end_run()
    client = mlflow.MlflowClient()
    batch = [mlflow.entities.Metric(f"figure{n % 20}", n / 7, 1_700_000_000_123 + n, n // 20) for n in range(1000)]
    batch[3] = mlflow.entities.Metric("figure3", float("nan"), 1_700_000_000_126, 0)
    for part in (batch[:500], batch, batch):
        client.log_batch(run_id, metrics=part)
    assert count(output, run_id) == 1000


def test_what_is_refused_is_left_out_and_named_and_the_rest_goes_on(config, quick, capsys):
    with tracked_run.track_run(config) as run_id:
        add_line(config.folder / "steps.jsonl", **{"step": 0, "no?such": 1.0})
        wait_for(lambda: "refuses metrics of step 0: " in capsys.readouterr().err, "MLflow")
        add_steps(config, 1)
    told = capsys.readouterr().err
    assert "did not receive: metrics of step 0. Everything is in the run folder." in told
    assert history(run_id) == [(1, 0.1)]


@pytest.mark.parametrize(
    ("status", "pointless"), [(400, True), (401, True), (404, True), (408, False), (429, False), (500, False)]
)
def test_a_wrong_request_is_refused_and_an_overloaded_server_is_asked_again(status, pointless):
    away = requests.HTTPError("no", response=SimpleNamespace(status_code=status))
    assert mlflow_store.is_refused(away) == pointless
    codes = mlflow.exceptions.ERROR_CODE_TO_HTTP_STATUS
    for code in (code for code, number in codes.items() if number == status):
        refusal = mlflow.MlflowException("no", error_code=mlflow.protos.databricks_pb2.ErrorCode.Value(code))
        assert mlflow_store.is_refused(refusal) == pointless


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
    monkeypatch.setattr(mlflow_store, "CONFLICT_S", (0.01,) * len(mlflow_store.CONFLICT_S))
    store = Store(monkeypatch)
    store.error = mlflow.MlflowException(said, error_code=mlflow.protos.databricks_pb2.BAD_REQUEST)
    store.when = "before"
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        wait_for(lambda: store.asked > len(mlflow_store.CONFLICT_S) + 2, "MLflow")
        store.when = ""
    told = capsys.readouterr().err
    assert "refuses" not in told
    assert "did not receive" not in told
    assert history(run_id) == [(0, 0.0)]


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


@pytest.mark.parametrize("uri", ["file:{}", "{}", "mlruns"], ids=["file", "folder", "relative"])
def test_a_folder_as_the_store_is_bad_input(config, tmp_path, uri):
    """It would keep a figure as often as it is sent."""
    other = config.model_copy(update={"tracking": Tracking(uri=uri.format(tmp_path))})
    with pytest.raises(BadInput, match=r"tracking\.uri = .*give sqlite:///FILE"), tracked_run.track_run(other):
        pass


def test_neither_an_error_of_the_system_nor_a_damaged_file_ends_the_mirror_or_the_run(
    config, quick, monkeypatch, capsys
):
    with tracked_run.track_run(config) as run_id:
        monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc/none")  # psutil can't read the machine's load
        time.sleep(0.5)
        add_steps(config, 0)
        wait_for(lambda: history(run_id), "MLflow")
        monkeypatch.setattr(psutil, "PROCFS_PATH", "/proc")
        with (config.folder / "evaluations.jsonl").open("a") as file:
            file.write("\0\0\0\n")
        add_steps(config, 1)
        time.sleep(0.5)
    assert "evaluations.jsonl, line 1: it is damaged" in capsys.readouterr().err.splitlines()[-1]
    assert history(run_id) == [(0, 0.0), (1, 0.1)]
    assert mlflow.get_run(run_id).info.status == "FINISHED"


def test_a_server_that_hangs_does_not_hold_up_the_end(config, quick, monkeypatch):
    hang = threading.Event()
    with tracked_run.track_run(config) as run_id:
        add_steps(config, 0)
        wait_for(lambda: history(run_id), "MLflow")
        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: hang.wait(30))
        add_steps(config, 1)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    hang.set()


def test_a_process_that_was_taken_over_writes_no_step(config, quick):
    folder = RunFolder(config.folder)
    folder.path.mkdir()
    with write_fenced(folder, 0):
        folder.fence.begin_attempt("training", "")
        with tracked_run.track_run(config) as run_id:
            add_steps(config, 0)
            wait_for(lambda: history(run_id), "MLflow")
            newer_attempt(folder.path)
            add_steps(config, 1)
    assert history(run_id) == [(0, 0.0)]


def test_evaluations_of_another_number_of_samples_have_curves_of_their_own(config):
    """As after a resume with another evaluate.samples."""
    config.folder.mkdir(parents=True, exist_ok=True)
    for step, samples in ((0, 4), (1, 4), (2, 16)):
        row = EVALUATION | {
            "step": step,
            "samples": samples,
            "pass_at_k": 0.75,
            "pass_ci_low": 0.5,
            "pass_ci_high": 0.9,
        }
        add_line(config.folder / "evaluations.jsonl", **row)
    with tracked_run.track_run(config) as run_id:
        evaluations.log_finished(config)
    for figure in ("avg_at_{}", "avg_at_{}_ci_low", "pass_at_{}", "pass_at_{}_ci_low"):
        for samples, steps in ((4, [0, 1]), (16, [2])):
            assert [step for step, _ in history(run_id, f"sums/{figure.format(samples)}")] == steps


def test_two_processes_that_mirror_the_same_evaluations_leave_each_once(config):
    """The same step twice, with other settings; the table of the second was deleted while MLflow was away."""
    (config.folder / "evaluations").mkdir(parents=True)
    append_line(config.folder / EVALUATION["table"], {"prompt_id": "x", "mean": 0.5})
    for second, (value, table) in enumerate(((0.25, "a"), (0.5, "b"), (0.5, "c"))):
        row = EVALUATION | {"avg_at_k": value, "table": f"evaluations/{table}.jsonl", "ended_s": 1e9 + second}
        add_line(config.folder / "evaluations.jsonl", **row)
    with tracked_run.track_run(config) as run_id:
        for _ in range(2):
            evaluations.log_finished(config)
    assert sorted(history(run_id, "sums/avg_at_1")) == [(0, 0.25), (0, 0.5), (0, 0.5)]
    assert [one.path for one in mlflow.MlflowClient().list_artifacts(run_id, "evaluations")] == [EVALUATION["table"]]


def test_samples_that_are_deleted_after_they_were_logged_are_not_missed(config, quick, capsys):
    folder = RunFolder(config.folder)
    folder.create(config, resume=True)
    with tracked_run.track_run(config) as run_id:
        folder.add_samples(0, [])
        wait_for(lambda: mlflow.MlflowClient().list_artifacts(run_id, "responses"), "MLflow")
        folder.samples_of(0).unlink()
    assert "did not receive" not in capsys.readouterr().err


@pytest.mark.parametrize("alike", [False, True], ids=["two names", "one name"])
def test_each_of_several_sets_is_a_data_set_of_its_own(output, alike):
    """Also if their files are called alike; the names of all together may be longer than a path can be."""
    folder = output / f"sets-{alike}"
    names = [f"{'part' * 20}-{number}/train.jsonl" for number in range(40)] if alike else ["sums.jsonl", "old, x.jsonl"]
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
    trained = ", ".join(map(str, files if alike else [files[0], "team/maths@main (held out 0.1)"]))
    found = {"train": {"source": trained, **HASHES}, "heldout": {"source": str(files[0 if alike else 1]), **HASHES}}
    with tracked_run.track_run(Config(run=Run(name=f"sets-{alike}", output=str(output)))) as run_id:
        mirror.log_datasets(mlflow.MlflowClient(), run_id, found)
    logged = {one.dataset.name: one.dataset.source for one in mlflow.get_run(run_id).inputs.dataset_inputs}
    if alike:
        assert logged.keys() == {*map(str, files), "train.jsonl"}
        return
    assert len(logged) == 3
    assert str(files[0]) in logged["sums.jsonl (held out 0.1)"]
    assert "team/maths" in next(source for name, source in logged.items() if "maths" in name)
    assert str(files[1]) in logged["old, x.jsonl"]


def test_what_is_beside_the_figures(output):
    """Of a run of forty steps that is resumed with other settings: files, samples, parameters, load, the base model."""
    model = output / "base.model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = Config(
        run=Run(name="files", output=str(output)),
        data=Data(train="d" * 7000, prompt_template="\x1b[2J{problem}"),
        train=Train(steps=40),
    )
    with tracked_run.track_run(config):
        folder = RunFolder(config.folder)
        folder.create(config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})}), False)
        for step in range(4):
            (folder.responses / f"step-{step:06d}.jsonl").write_text("{}\n")
        (folder.path / "timeline.html").write_text("<html>")
    with tracked_run.track_run(config.model_copy(update={"train": Train(steps=50)})) as run_id:
        pass
    client = mlflow.MlflowClient()
    run = mlflow.get_run(run_id)
    assert {item.path for item in client.list_artifacts(run_id)} >= {"timeline.html", "responses"}
    samples = {item.path for item in client.list_artifacts(run_id, "responses")}
    assert samples == {"responses/step-000000.jsonl", "responses/step-000002.jsonl"}, "40 steps: every second"
    assert (run.data.params["train.steps"], run.data.tags["changed.train.steps"]) == ("40", "50")
    assert len(run.data.params["data.train"]) == 6000
    assert run.data.params["data.train"].endswith("ddd ... (7000 characters; complete in config.toml)")
    assert run.data.params["data.prompt_template"] == r"\x1b[2J{problem}"
    assert "changed.data.train" not in run.data.tags
    assert run.data.metrics["system/cpu_utilization_percentage"] >= 0
    assert run.data.metrics["system/system_memory_usage_megabytes"] > 100
    (given,) = run.inputs.model_inputs
    params = client.get_logged_model(given.model_id).params
    assert (params["path"], len(params["content_hash"])) == (str(model), 64)


ATTEMPT = """
import sys, time
from engine.config import Config, Run
from engine.run.files import append_line
from engine.run.folder import RunFolder
from support.run_folders import add_line
from tasks.tracking import mirror, tracked_run

output, attempt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
mirror.EVERY_S = 0.01
config = Config(run=Run(name="killed", output=output))
folder = RunFolder(config.folder)
with tracked_run.track_run(config):
    print("tracked", flush=True)
    first = 3 * attempt
    folder.cut_steps(first)
    (folder.path / "evaluations").mkdir(exist_ok=True)
    for step in range(first, steps):
        add_line(folder.steps, step=step, loss=attempt + step / 100, step_s=0.05)
        if step % 3 == 2:
            row = {"step": step, "weight_version": step, "benchmark": "b", "problems": 1, "samples": 1}
            row |= {"avg_at_k": 0.5, "ci_low": 0.1, "ci_high": 0.9, "table": f"evaluations/{attempt}-{step}.jsonl"}
            append_line(folder.path / row["table"], {"prompt_id": "x", "mean": 0.5})
            add_line(folder.evaluations, **row)
        time.sleep(0.05)
"""


@pytest.mark.faults
def test_each_figure_is_there_once_after_kills_at_any_moment(output):
    """The figures of a line of steps.jsonl or evaluations.jsonl, and those of attempts whose steps were done again."""
    chance = random.Random(3)
    for attempt in range(3):
        command = [sys.executable, "-c", ATTEMPT, str(output), str(attempt), "60"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "tests"}
        ) as child:
            assert child.stdout.readline() == "tracked\n"
            if attempt < 2:
                time.sleep(chance.uniform(0.5, 1.5))
                child.kill()
    assert child.returncode == 0
    folder = RunFolder(output / "killed")
    mlflow.set_tracking_uri(f"sqlite:///{output / 'mlflow.db'}")
    run = mlflow.get_run((folder.path / tracked_run.RUN_ID).read_text())
    client = mlflow.MlflowClient()
    for name, file, key in (("loss", folder.steps, "loss"), ("b/avg_at_1", folder.evaluations, "avg_at_k")):
        points = [
            (point.timestamp, point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        ]
        assert len(points) == len(set(points))
        assert {(round(row["ended_s"] * 1000), row["step"], row[key]) for row in read_lines(file)} <= {*points}
    assert [row["step"] for row in read_lines(folder.steps)] == list(range(60))
    assert len(history(run.info.run_id)) == len(history(run.info.run_id, "step_s"))
    assert run.info.status == "FINISHED"


def test_the_machines_load_is_logged_after_a_figure_of_the_run(config):
    """MLflow's pages show first what was logged first."""
    config.folder.mkdir(parents=True)
    run = tracked_run.create_run(config)
    mlflow.end_run()
    ours = mirror.Mirror(run, config, {})
    for steps, there in ((), set()), ((0,), {"loss", "system"}):
        add_steps(config, *steps)
        ours.sample_load(SystemMetricsMonitor(run.info.run_id))
        ours.push(whole=False)
        logged = mlflow.get_run(run.info.run_id).data.metrics
        assert {name.partition("/")[0] for name in logged} & {"loss", "system"} == there
