"""Trainer ranks that die or hang in whole runs: the run names them, ends, and leaves no process."""

import time

import pytest

from engine.run.checkpoint_files import latest_checkpoint, step_of
from support.runs import ROOT, Tree, send, wait_for
from support.whole_runs import orchestrating, rank, run, steps

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(600)]
REWARDS = ROOT / "tests/support/rewards.py"


def end_of(settings, folder, number, signal, timeout_s):
    """What the orchestrator of an endless run says when one of its ranks gets a signal in the middle of a step."""
    with orchestrating(settings | {"train.steps": 100_000}, folder) as (orchestrator, said):
        wait_for(lambda: steps(folder, "run"), "the first step")
        tree = Tree(orchestrator.pid)
        time.sleep(1.5)
        send(rank(tree, number), signal)
        assert orchestrator.wait(timeout=timeout_s) == 1
        assert tree.left() == []
        return said()


@pytest.mark.parametrize("axis", ["tensor", pytest.param("pipeline", marks=pytest.mark.nightly)])
def test_a_rank_that_only_follows_dies(axis, settings, tmp_path):
    """Rank 1 asks the orchestrator for nothing; the others wait for it in a collective, or for what its stage sends."""
    said = end_of(settings | {f"parallel.{axis}": 2}, tmp_path, 1, "SIGKILL", timeout_s=60)
    assert "trainer rank 1: Signal 9 (SIGKILL)" in said


@pytest.mark.nightly
def test_a_replica_that_hangs_is_named_and_the_run_resumes(settings, tmp_path):
    """A stopped process hears neither signals nor its lifeline.
    The others get as long again to stop, before all are killed."""
    silent_s = 15
    slow = settings | {
        "train.timeout_s": silent_s,
        "parallel.data": 2,
        "reward.function": f"{REWARDS}:after_3_s",
        "train.prompts_per_step": 2,
        "checkpoint.every": 1,
    }
    said = end_of(slow, tmp_path, 1, "SIGSTOP", timeout_s=4 * silent_s)
    assert f"no sign of life from replica group 1 of the trainer in {silent_s} s (train.timeout_s)" in said
    done = step_of(latest_checkpoint(tmp_path / "run/checkpoints"))
    assert done >= 1
    run(slow | {"train.steps": done + 2}, tmp_path, "--resume")
    assert [line["step"] for line in steps(tmp_path, "run")] == list(range(done + 2))
