"""Run folders with a damaged checkpoint, on a full disk, and under two orchestrators; on real runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.run.files import read_lines
from engine.run.folder import RunFolder
from support.run_folders import newer_attempt
from support.runs import ROOT, base_settings, wait_for, write_config
from support.whole_runs import orchestrating, steps

STEPS = 4


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


@pytest.mark.slow
def test_a_orchestrator_stops_before_it_writes_a_run_that_another_one_has_taken_over(exact):
    """The lock file is lost, as on a file server that was started again."""
    output = Path(exact["run.output"])
    settings = exact | {"run.name": "twice", "train.steps": 500, "checkpoint.every": 1}
    folder = RunFolder(output / "twice")
    with orchestrating(settings, output) as (older, said):
        wait_for(lambda: len(steps(output, "twice")) >= 2, "the second step")
        folder.lock.unlink()
        newer = newer_attempt(folder.path)  # as the newer orchestrator does
        before = len(steps(output, "twice"))
        assert older.wait(90) == 1
        told = said()
    assert len(steps(output, "twice")) <= before + 1  # one that was being written
    assert f"another attempt ({newer.attempt}) writes it now; this one (attempt 1) stops" in told
    assert "Traceback" not in told
    assert not folder.failure.exists()


FULL = """
set -e
mount -t tmpfs -o size=96m tmpfs {disk}
{python} -m engine.orchestrator.launch --config {config} > {logs}/first.log 2>&1 &
until [ -f {disk}/full/checkpoints/step-000004/_SUCCESS.json ]; do sleep 0.1; done
dd if=/dev/zero of={disk}/ballast bs=64k 2> /dev/null || true
wait $! && echo "it fitted" && exit 9
cp {disk}/full/failure.json {logs}/failure.json
rm {disk}/ballast
{python} -m engine.orchestrator.launch --config {config} --resume > {logs}/second.log 2>&1
cp {disk}/full/steps.jsonl {logs}/steps.jsonl
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a disk of its own")
def test_a_full_disk_ends_a_run_with_one_sentence_and_it_goes_on_when_there_is_space(exact, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    config = write_config(exact | {"run.name": "full", "run.output": str(disk), "train.steps": 40}, tmp_path)
    script = FULL.format(disk=disk, python=sys.executable, config=config, logs=tmp_path)
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
    assert [row["step"] for row in read_lines(tmp_path / "steps.jsonl")] == list(range(40))
