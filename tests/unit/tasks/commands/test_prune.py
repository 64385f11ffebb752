"""What `metronome prune` lists and deletes, and what it never touches."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import mlflow
import pytest

from engine.config import Checkpoint, Config, Model, Run, Tracking, Train
from engine.errors import BadInput
from engine.run.checkpoint_files import read_marker, step_of
from engine.run.files import append_line, write_json
from engine.run.folder import RunFolder, dump_config
from engine.run.identity import claim_run
from engine.run.lock import hold_lock
from engine.run.run_file import RunStart, read_run, update_run
from engine.run.served_model import REGISTERED, in_use
from engine.run.trace import Trace, read_spans
from support.run_folders import a_checkpoint
from support.runs import ROOT
from tasks.commands.prune import Retention, prune
from tasks.stages.publish import copy_checkpoint
from tasks.tracking import tracked_run
from tasks.tracking.registered_policies import NIGHTLY, START_TAG, started_from

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
    for name in ("checkpoints/damaged-step-000005", "profile"):
        (folder.path / name).mkdir()
        aged(folder.path / name)
    (folder.path / "record.msgpack").touch()
    folder.policy.mkdir()
    for name in ("used-1", "other-2"):
        model = tmp_path / "runs/models" / name
        model.mkdir(parents=True)
        (model / REGISTERED).write_text(f"models:/{name}\n")
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
    "mine/checkpoints/damaged-step-000005",
    "mine/profile",
    *(f"models/other-2{file}" for file in ("", f"/{REGISTERED}")),
}


def test_what_can_go_is_listed_and_goes_when_it_is_asked(run, tmp_path):
    output = tmp_path / "runs"
    before = all_files(output)
    told = prune([run.path], keep_steps=8, records=False, apply=False)
    assert all_files(output) == before
    assert len(read_spans(run.trace)) == STEPS
    assert "12 samples of steps before 12" in told
    assert "in all; with --yes it is deleted" in told
    assert "MiB deleted" in prune([run.path], keep_steps=8, records=False, apply=True)
    assert before - all_files(output) == GONE
    assert [span["step"] for span in read_spans(run.trace)] == list(range(12, STEPS))
    assert "nothing can go" in prune([run.path], keep_steps=8, records=False, apply=True)


@pytest.mark.parametrize(("has_policy", "steps"), [(True, STEPS), (False, STEPS), (True, STEPS + 2)])
def test_a_record_goes_if_it_is_asked_and_no_resume_needs_it(run, has_policy, steps):
    if not has_policy:
        run.policy.rmdir()
    config = run.read_config()
    dump_config(config.model_copy(update={"train": Train(steps=steps)}), run.config)
    prune([run.path], keep_steps=8, records=True, apply=True)
    assert (run.path / "record.msgpack").exists() == (not has_policy or steps > STEPS)


def test_an_exported_policy_stays_if_its_checkpoint_is_gone_or_a_run_started_from_it(run, tmp_path):
    (run.checkpoints / "step-000010/state.json").unlink()
    other = tmp_path / "runs/other"
    other.mkdir()
    dump_config(Config(model=Model(path="runs/mine/exported/step-000020")), other / "config.toml")
    prune([run.path], keep_steps=8, records=False, apply=True)
    assert sorted(path.name for path in run.path.glob("exported/step-*")) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("apply", [False, True])
def test_a_run_that_is_running_is_left_as_it_is(run, tmp_path, capsys, apply):
    shutil.rmtree(tmp_path / "runs/models/other-2")
    before = all_files(run.path)
    with hold_lock(run.lock, "", 0.0):
        assert "nothing can go" in prune([run.path], keep_steps=0, records=True, apply=apply)
    assert all_files(run.path) == before
    assert "is in use by process" in capsys.readouterr().err


def test_nothing_is_deleted_for_a_wrong_folder_or_beside_a_damaged_config(run, tmp_path):
    before = all_files(run.path)
    with pytest.raises(BadInput, match="neither a run folder"):
        prune([run.path, tmp_path], keep_steps=0, records=True, apply=True)
    (tmp_path / "runs/later/config.toml").write_text("[model")
    with pytest.raises(BadInput, match="damaged, so what the run needs is unknown"):
        prune([run.path], keep_steps=0, records=True, apply=True)
    assert all_files(run.path) == before


def an_old_run(output, name, model="base", age_days=40.0):
    """A run that changed long ago, with a checkpoint at `checkpoint.path` too."""
    config = Config(
        run=Run(name=name, output=str(output)),
        model=Model(path=model),
        checkpoint=Checkpoint(path=str(output.parent / "published")),
    )
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    claim_run(config, resume=False)
    (folder.policy).mkdir()
    kept = a_checkpoint(folder.checkpoints, 5, run=read_run(folder.path).id)
    copy_checkpoint(kept, folder.policy, f"{config.checkpoint.path}/{name}/{kept.name}")
    for file in (folder.config, folder.path / "run.json"):
        os.utime(file, (time.time() - age_days * 86400,) * 2)
    return folder


def everywhere(output):
    """(run folders, published checkpoints) that are there."""
    return tuple(
        sorted(path.parents[depth].name for path in output.glob(pattern))
        for depth, pattern in ((0, "runs/*/config.toml"), (1, "published/*/*/_SUCCESS.json"))
    )


def test_whole_runs_go_by_a_rule_with_their_checkpoints_but_no_run_that_is_needed(tmp_path, capsys):
    runs = [an_old_run(tmp_path / "runs", f"night-{n}", age_days=50 - 10 * n) for n in range(5)]
    before = everywhere(tmp_path)
    assert before == ([f"night-{n}" for n in range(5)],) * 2
    given = {"runs": [tmp_path / "runs"], "keep_steps": 100, "records": False, "rule": Retention(last=1, days=15)}
    with in_use(runs[0].policy):  # `metronome serve --model runs/night-0`
        told = prune(**given, apply=False)
        assert everywhere(tmp_path) == before
        assert [line for line in told.splitlines() if "an old run" in line and "night-0" in line] == []
        assert f"run folder {runs[0].path} is in use by process" in capsys.readouterr().err
        prune(**given, apply=True)
        assert everywhere(tmp_path) == (["night-0", "night-4"],) * 2
    prune(**given, apply=True)
    assert everywhere(tmp_path) == (["night-4"],) * 2


def one_of_its_folder(output, first):
    an_old_run(output, "second", str(Path(output.name) / first.path.name / "policy"))
    return [first.path], Retention(days=1), "a run that stays starts from its policy"


def given_twice(output, first):
    return [output, first.path], Retention(last=1), ""


def with_a_link(output, first):
    (output / "latest").symlink_to(first.path)
    return [output], Retention(last=1), ""


def with_a_copy(output, first):
    shutil.copytree(first.path, output.parent / "elsewhere/first")
    return [output.parent / "elsewhere"], Retention(days=1), f"by its config.toml it belongs at {first.path}"


@pytest.mark.parametrize("case", [one_of_its_folder, given_twice, with_a_link, with_a_copy])
def test_a_whole_run_stays_if_it_may_be_needed_or_may_not_be_the_one_that_is_meant(tmp_path, capsys, case):
    first = an_old_run(tmp_path / "runs", "first")
    places, rule, why = case(tmp_path / "runs", first)
    before = all_files(tmp_path)
    prune(places, keep_steps=100, records=False, apply=True, rule=rule)
    assert all_files(tmp_path) == before
    assert why in capsys.readouterr().err


def test_the_start_of_a_run_that_is_under_way_stays(tmp_path):
    first = an_old_run(tmp_path / "runs", "first")
    second = an_old_run(tmp_path / "runs", "second", str(first.policy))
    before = all_files(tmp_path)
    with hold_lock(second.lock, "", 0.0):
        prune([tmp_path / "runs"], keep_steps=100, records=False, apply=True, rule=Retention(days=1))
    assert all_files(tmp_path) == before


def test_models_that_are_in_use_or_of_the_users_own_stay(run, tmp_path, capsys):
    own = [aged_folder(tmp_path / "runs/models" / name) for name in ("Qwen2.5-7B", "Qwen3-8", "my-own-model-3")]
    served = run.path / "exported/step-000010"
    with in_use(served):
        prune([run.path], keep_steps=100, records=False, apply=True)
    assert all(one.is_dir() for one in own)
    assert [path.name for path in run.path.glob("exported/step-*")] == [served.name]
    assert f"model {served} is in use by process" in capsys.readouterr().err


def test_a_link_goes_and_what_it_leads_to_stays(run, tmp_path):
    """As of a profile or half a copy that was moved to another disk."""
    other = tmp_path / "disk"
    other.mkdir()
    (other / "trace.json").write_text("{}")
    profile = run.path / "profile"
    shutil.rmtree(profile)
    links = [profile, run.path / "gone.partial", run.path / "whole.partial"]
    for link, target in zip(links, (other, tmp_path / "nothing", other), strict=True):
        link.symlink_to(target)
        os.utime(link, (time.time() - 1e6,) * 2, follow_symlinks=False)
    prune([run.path], keep_steps=100, records=False, apply=True)
    assert [one for one in links if one.is_symlink()] == []
    assert (other / "trace.json").read_text() == "{}"


def aged_folder(path):
    path.mkdir()
    return aged(path)


def test_a_restored_backup_continues_the_chain_of_nights(tmp_path, tiny_model):
    """With Prefect's and MLflow's kind of database open and in use."""
    runs = tmp_path / "runs"
    name = f"metronome-{tmp_path.name}"
    night = RunFolder(runs / "night-1")
    night.path.mkdir(parents=True)
    update_run(night.path, start=RunStart(start=NIGHTLY, registered=name))
    night.create(Config(run=Run(name="night-1", output=str(runs))), resume=False)
    with tracked_run.track_run(night.read_config()):
        version = tracked_run.register_version(name, tiny_model)
    mlflow.MlflowClient().set_model_version_tag(name, version, START_TAG, NIGHTLY)
    backup = tmp_path / "backup"
    copy = [sys.executable, str(ROOT / "infra/backup.py")]
    with closing(sqlite3.connect(runs / "prefect.db")) as prefect:
        prefect.execute("PRAGMA journal_mode = WAL")
        prefect.execute("CREATE TABLE flow_run (name TEXT)")
        prefect.execute("INSERT INTO flow_run VALUES ('night-1')")
        prefect.commit()
        prefect.execute("INSERT INTO flow_run VALUES ('half')")  # under way
        subprocess.run([*copy, str(runs), str(backup)], check=True)
    shutil.rmtree(runs)
    subprocess.run([*copy, str(backup), str(runs)], check=True)
    assert subprocess.run([*copy, str(backup), str(runs)], capture_output=True, check=False).returncode == 1
    with closing(sqlite3.connect(runs / "prefect.db")) as prefect:
        assert prefect.execute("SELECT name FROM flow_run").fetchall() == [("night-1",)]
    assert night.path.stat().st_mode & 0o777 == 0o700
    recipe = tmp_path / f"{tmp_path.name}.toml"
    recipe.touch()
    wanted = {"name": "night-2", "output": str(runs), "seed": 0}
    config = Config(run=Run(**wanted), tracking=Tracking(uri=f"sqlite:///{runs / 'mlflow.db'}"))
    tonight, begun = started_from(config, str(recipe), "nightly")
    assert begun.continued_from == f"models:/metronome-{tmp_path.name}/1"
    assert (Path(tonight.model.path) / "model.safetensors").read_bytes() == (
        tiny_model / "model.safetensors"
    ).read_bytes()
    assert tonight.run.seed == 1


def test_a_backup_is_as_private_as_the_folder_and_is_never_in_it(tmp_path):
    runs = tmp_path / "runs"
    (runs / "services").mkdir(parents=True)
    (runs / "services/prefect.password").write_text("secret")
    with closing(sqlite3.connect(runs / "services/prefect.db")) as prefect:
        prefect.execute("CREATE TABLE flow_run (name TEXT)")
    modes = {"": 0o700, "services": 0o750, "services/prefect.password": 0o600, "services/prefect.db": 0o640}
    for name, mode in modes.items():
        (runs / name).chmod(mode)
    copy = [sys.executable, str(ROOT / "infra/backup.py"), str(runs)]
    refused = subprocess.run([*copy, str(runs / "backup")], capture_output=True, text=True, check=False)
    assert "would be copied into itself" in refused.stderr
    subprocess.run([*copy, str(tmp_path / "backup")], check=True)
    assert {name: (tmp_path / "backup" / name).stat().st_mode & 0o777 for name in modes} == modes


def test_a_locked_database_holds_a_backup_no_longer_than_its_deadline(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    code = "import sys; from pathlib import Path; from infra import backup; backup.LOCKED_S = 0.1; "
    code += "backup.copy_folder(*map(Path, sys.argv[1:]))"
    with closing(sqlite3.connect(runs / "mlflow.db")) as locked:
        locked.execute("CREATE TABLE runs (name TEXT)")
        locked.execute("BEGIN EXCLUSIVE")
        command = [sys.executable, "-c", code, str(runs), str(tmp_path / "backup")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"{runs / 'mlflow.db'} has been locked by another process for 0.1 s" in done.stderr
    assert not (tmp_path / "backup").exists()
