"""What `metronome prune` lists and deletes, and what it never touches."""

import os
import time

import pytest

from engine.config import Config, Model, Run, Train
from engine.errors import BadInput
from engine.run.checkpoint_files import read_marker, step_of
from engine.run.files import append_line, write_json
from engine.run.folder import RunFolder, dump_config
from engine.run.lock import hold_lock
from engine.run.trace import Trace, read_spans
from support.run_folders import a_checkpoint
from tasks.prune import prune

STEPS = 20


def aged(path):
    """The path, as if made long ago."""
    os.utime(path, (time.time() - 1e6,) * 2)
    return path


def export_of(checkpoint, folder):
    copy = folder / "exported" / checkpoint.name
    copy.mkdir(parents=True)
    write_json(copy / "checkpoint.json", {"id": read_marker(checkpoint)["id"], "weight_version": step_of(checkpoint)})


@pytest.fixture
def run(tmp_path):
    """A run that ended, with more than anybody needs."""
    folder = RunFolder(tmp_path / "runs/mine")
    config = Config(run=Run(name="mine", output=str(tmp_path / "runs")), train=Train(steps=STEPS))
    folder.create(config, resume=False)
    trace = Trace(folder.trace, "trainer-0")
    for step in range(STEPS):
        trace.add_span("train", step, step + 1, step=step)
        append_line(folder.steps, {"step": step})
        folder.add_samples(step, [])
    trace.flush()
    (folder.path / "evaluations").mkdir()
    for version in (0, 5, 10, 15):
        table = f"evaluations/heldout-v{version}.jsonl"
        (folder.path / table).write_text("{}")
        row = {"weight_version": version, "benchmark": "heldout", "protocol": {}, "in_run": True, "table": table}
        append_line(folder.evaluations, row)
    for step in (10, 20):
        export_of(a_checkpoint(folder.checkpoints, step), folder.path)
    aged(a_checkpoint(folder.checkpoints, 15).rename(folder.checkpoints / ".step-000015.partial"))  # whole
    (folder.checkpoints / ".step-000016.partial").mkdir()
    aged(folder.checkpoints / ".step-000016.partial")
    (folder.logs / ".young.partial").touch()
    (folder.path / "record.msgpack").touch()
    folder.policy.mkdir()
    for name in ("used-1", "other-2"):
        model = tmp_path / "runs/models" / name
        model.mkdir(parents=True)
        aged(model)
    later = tmp_path / "runs/later"
    later.mkdir()
    dump_config(Config(model=Model(path=str(tmp_path / "runs/models/used-1"))), later / "config.toml")
    return folder


def all_files(folder):
    """All but the locks."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "lock" not in path.name}


GONE = {
    *(f"mine/responses/step-{step:06d}.jsonl" for step in range(12)),
    *(f"mine/evaluations/heldout-v{version}.jsonl" for version in (5, 10)),
    *(f"mine/exported/step-{step:06d}{file}" for step in (10, 20) for file in ("", "/checkpoint.json")),
    "mine/checkpoints/.step-000016.partial",
    "models/other-2",
}


def test_what_can_go_is_listed_and_goes_when_it_is_asked(run, tmp_path):
    output = tmp_path / "runs"
    before = all_files(output)
    told = prune([run.path], keep_steps=8, records=False, apply=False)
    assert all_files(output) == before
    assert len(read_spans(run.trace)) == STEPS
    assert "12 samples of steps before 12" in told
    assert told.endswith("in all; with --yes it is deleted")
    assert prune([run.path], keep_steps=8, records=False, apply=True).endswith("MiB deleted")
    assert before - all_files(output) == GONE
    assert [span["step"] for span in read_spans(run.trace)] == list(range(12, STEPS))
    assert prune([run.path], keep_steps=8, records=False, apply=True) == "nothing can go"


@pytest.mark.parametrize("finished", [True, False])
def test_a_record_goes_if_it_is_asked_and_no_resume_needs_it(run, finished):
    if not finished:
        run.policy.rmdir()
    prune([run.path], keep_steps=8, records=True, apply=True)
    assert (run.path / "record.msgpack").exists() != finished


def test_an_exported_policy_stays_if_its_checkpoint_is_gone_or_a_run_started_from_it(run, tmp_path):
    (run.checkpoints / "step-000010/state.json").unlink()
    other = tmp_path / "runs/other"
    other.mkdir()
    dump_config(Config(model=Model(path="runs/mine/exported/step-000020")), other / "config.toml")
    prune([run.path], keep_steps=8, records=False, apply=True)
    assert sorted(path.name for path in run.path.glob("exported/step-*")) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("apply", [False, True])
@pytest.mark.parametrize("lock", ["lock", "logs/orchestrator.lock"])
def test_a_run_that_is_running_is_left_as_it_is(run, tmp_path, capsys, lock, apply):
    (tmp_path / "runs/models/other-2").rmdir()
    before = all_files(run.path)
    with hold_lock(run.path / lock, "", 0.0):
        assert prune([run.path], keep_steps=0, records=True, apply=apply) == "nothing can go"
    assert all_files(run.path) == before
    assert "is in use by process" in capsys.readouterr().err


def test_nothing_is_deleted_for_a_wrong_folder_or_beside_a_damaged_config(run, tmp_path):
    before = all_files(run.path)
    with pytest.raises(BadInput, match="not a run folder"):
        prune([run.path, tmp_path], keep_steps=0, records=True, apply=True)
    (tmp_path / "runs/later/config.toml").write_text("[model")
    with pytest.raises(BadInput, match="damaged, so what the run needs is unknown"):
        prune([run.path], keep_steps=0, records=True, apply=True)
    assert all_files(run.path) == before
