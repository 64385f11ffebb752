"""The run folder after a power cut, with damaged checkpoints, on a full disk, and under two launchers; on real runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from engine.errors import MetronomeError
from engine.launcher import drain_evaluation
from engine.run.checkpoint_files import step_of
from engine.run.checkpoint_search import newest_whole
from engine.run.fence import Fence
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from engine.run.identity import claim, identity
from engine.run.start import RunStart, read_start
from engine.run.trace import Trace
from engine.tools.timeline import draw
from support.runs import ROOT, base_settings, launch, wait_for, write_config
from tasks.compare import from_folder
from tasks.finished_stages import Stages, count_attempt, last_end

STEPS = 4
EVALUATION = {"step": 0, "weight_version": 3, "benchmark": "heldout", "in_run": True}


@pytest.fixture(scope="module")
def exact(tiny_model, problems, tmp_path_factory):
    """Settings of a deterministic run with a checkpoint before step 2 and one at the end."""
    folder = tmp_path_factory.mktemp("kept")
    return base_settings(tiny_model, problems, folder) | {
        "train.steps": STEPS,
        "checkpoint.every": 2,
        "rollout.deterministic": True,
        "rollout.concurrency": 1,
        "train.consume": "prompt_order",
    }


@pytest.fixture(scope="module")
def finished(exact):
    """The folder of a run that ended, with what a flow writes there."""
    output = Path(exact["run.output"])
    code, told = launch(exact | {"run.name": "finished"}, output)
    assert code == 0, told
    folder = RunFolder(output / "finished")
    RunStart().write(folder.path)
    Stages(folder).once("train", lambda: STEPS)
    count_attempt(folder, "training", 3, "started by a person")
    append_line(folder.evaluations, EVALUATION)
    return folder


def interrupted(finished, to):
    """The folder as it was before the last step: the last checkpoint is not there."""
    shutil.copytree(finished.path, to)
    shutil.rmtree(to / "policy")
    shutil.rmtree(to / "checkpoints/step-000004")
    (to / "stages.json").unlink()
    folder = RunFolder(to)
    folder.fail(MetronomeError("it was ended"))
    return folder


def weights(folder):
    return {key: tensor.tobytes() for key, tensor in load_file(folder.path / "policy/model.safetensors").items()}


def reads(path):
    """All that a flow, a launcher and its trainer read when they resume a run, and what shows it. The step."""
    folder = RunFolder(path)
    config = folder.read_config()
    last_end(folder)
    claim(path, config, resume=True)
    Fence.begin(path)
    read_start(path)
    count_attempt(folder, "training", 99, "it was ended", by_hand=True)
    _ = Stages(folder).done
    folder.create(config, resume=True)
    found = newest_whole(folder.checkpoints, "", identity(path), lambda line: None)
    step = 0 if found is None else step_of(found)
    folder.cut(step)
    drain_evaluation.cut(folder, step)
    Trace(folder.trace, "launcher").flush()
    draw(path)
    from_folder(path)
    return step


def outcome(path):
    """The step with which a run goes on, or the sentence that refuses that."""
    try:
        return reads(path)
    except MetronomeError as error:
        return str(error)


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "interrupted"])
def test_every_state_file_may_be_torn(finished, tmp_path, ended):
    whole = finished if ended else interrupted(finished, tmp_path / "interrupted")
    files = [
        path
        for path in sorted(whole.path.rglob("*"))
        if path.is_file() and "logs" not in path.parts and "policy" not in path.parts
    ]
    assert {path.name for path in files} >= {"config.toml", "run_id", "steps.jsonl", "start.json", "_SUCCESS.json"}
    ends = {}
    for path in files:
        name = path.relative_to(whole.path)
        for length in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
            torn = tmp_path / "torn"
            shutil.rmtree(torn, ignore_errors=True)
            shutil.copytree(whole.path, torn)
            os.truncate(torn / name, length)
            ends[str(name), length] = end = outcome(torn)
            assert isinstance(end, int) or ("\n" not in end and str(torn) in end), end
    damaged = {(name, end) for (name, _), end in ends.items() if name.startswith("checkpoints/step-000004")}
    assert {end for name, end in damaged} == ({2} if ended else set())
    refused = {name for (name, _), end in ends.items() if isinstance(end, str)}
    assert "run_id" in refused
    assert not refused & {"attempts.jsonl", "evaluations.jsonl", "failure.json"}


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one_bit_for_bit(exact, finished):
    output = Path(exact["run.output"])
    folder = RunFolder(output / "damaged")
    shutil.copytree(finished.path, folder.path)
    shutil.rmtree(folder.policy)
    file = next((folder.checkpoints / "step-000004").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, told = launch(exact | {"run.name": "damaged"}, output, "--resume")
    assert code == 0, told
    assert weights(folder) == weights(finished)
    assert [row["step"] for row in read_lines(folder.steps)] == list(range(STEPS))
    log = (folder.logs / "trainer.log").read_text()
    assert f"step-000004: {file.name} is not the file that _SUCCESS.json was written for" in log
    assert "skipped, and kept as damaged-step-000004" in log
    kept = folder.checkpoints / "damaged-step-000004" / file.name
    assert kept.read_bytes() == bytes(data)


def test_a_launcher_stops_before_it_writes_a_run_that_another_one_has_taken_over(exact):
    """The lock file is lost, as on a file server that was started again."""
    output = Path(exact["run.output"])
    settings = exact | {"run.name": "twice", "train.steps": 500, "checkpoint.every": 1}
    command = [sys.executable, "-m", "engine.launcher.launch", "--config", str(write_config(settings, output))]
    folder = RunFolder(output / "twice")
    log = output / "older.log"
    with log.open("w") as told:
        older = subprocess.Popen(command, cwd=ROOT, stderr=told)
    try:
        wait_for(lambda: len(list(read_lines(folder.steps))) >= 2, "the second step")
        folder.launcher_lock.unlink()
        newer = Fence.begin(folder.path)  # as the newer launcher does
        before = len(list(read_lines(folder.steps)))
        assert older.wait(90) == 1
    finally:
        older.kill()
        older.wait()
    assert len(list(read_lines(folder.steps))) <= before + 1  # one that was being written
    assert f"another launcher (attempt {newer.attempt}) writes it now; this one (attempt 1) stops" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not folder.failure.exists()


FULL = """
set -e
mount -t tmpfs -o size={mib}m tmpfs {disk}
{python} -m engine.launcher.launch --config {config} > {logs}/first.log 2>&1 && echo "it fitted" && exit 9
cp {disk}/full/failure.json {logs}/failure.json
mount -o remount,size=2g {disk}
{python} -m engine.launcher.launch --config {config} --resume > {logs}/second.log 2>&1
cp -r {disk}/full {logs}/run
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a disk of its own")
def test_a_full_disk_ends_a_run_with_one_sentence_and_it_goes_on_when_there_is_space(exact, finished, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in (finished.checkpoints / "step-000004").iterdir())
    settings = exact | {"run.name": "full", "run.output": str(disk)}
    config = write_config(settings, tmp_path)
    script = FULL.format(
        mib=round(1.7 * size / 2**20) + 1, disk=disk, python=sys.executable, config=config, logs=tmp_path
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=220
    )
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    first = (tmp_path / "first.log").read_text()
    told = json.loads((tmp_path / "failure.json").read_text())["message"]
    assert "No space left on device" in told
    assert "\n" not in told
    assert "Traceback" not in first
    assert told in first
    assert weights(RunFolder(tmp_path / "run")) == weights(finished)
