"""Whole runs in parallel layouts: starting them, finding their ranks, reading what they left."""

import subprocess
import sys
from contextlib import contextmanager

from safetensors.torch import load_file

from engine.run.checkpoint_files import latest_checkpoint, step_of
from engine.run.files import read_lines
from engine.run.trace import read_spans
from support.runs import ROOT, Tree, launch, send, wait_for, write_config


def run(settings, folder, *arguments, timeout_s=200):
    code, output = launch(settings, folder, *arguments, timeout_s=timeout_s)
    log = folder / settings["run.name"] / "logs/trainer.log"
    assert code == 0, output + "\ntrainer.log ends:\n" + log.read_text()[-3000:]


def refused(settings, folder, *arguments):
    code, output = launch(settings, folder, *arguments)
    assert code == 2, output
    return output


def start(settings, folder):
    log = (folder / f"{settings['run.name']}.log").open("w+")
    command = [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(write_config(settings, folder))]
    return subprocess.Popen(command, stderr=log, cwd=ROOT), log


@contextmanager
def orchestrating(settings, folder):
    """(the orchestrator of a run, a function that returns its stderr so far). It is killed with the block."""
    orchestrator, log = start(settings, folder)
    try:
        yield orchestrator, lambda: (log.seek(0), log.read())[1]
    finally:
        orchestrator.kill()
        orchestrator.wait()


def rank(tree, number):
    """The process of a trainer rank."""
    (found,) = [
        process
        for process in tree.processes
        if "engine.trainer.rank" in process.cmdline() and process.environ()["RANK"] == str(number)
    ]
    return found


def weights(folder, name):
    files = (folder / name / "policy").glob("*.safetensors")
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def same(one, other):
    """Whether they are, bit for bit."""
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def steps(folder, name):
    return list(read_lines(folder / name / "steps.jsonl"))


def spans(folder, name, kind, rank=None):
    found = [span for span in read_spans(folder / name / "trace") if span["name"] == kind]
    return [span for span in found if rank is None or span["lane"] == f"trainer-{rank}"]


def kill_a_rank(settings, folder):
    """Run until the third step and a checkpoint are there, kill rank 1, and see that all end and the message names it.

    `settings`: with checkpoint.every = 2 and two ranks.
    """
    place = folder / settings["run.name"]
    checkpoints = place / "checkpoints"
    with orchestrating(settings, folder) as (orchestrator, said):
        wait_for(
            lambda: len(steps(folder, settings["run.name"])) >= 3 and latest_checkpoint(checkpoints),
            "the third step and a checkpoint",
        )
        tree = Tree(orchestrator.pid)
        send(rank(tree, 1), "SIGKILL")
        assert orchestrator.wait(timeout=60) == 1
        assert tree.left() == []
        assert "trainer rank 1: Signal 9 (SIGKILL)" in said()
    assert not (place / "policy").exists()
    assert step_of(latest_checkpoint(checkpoints)) in (2, 4)
