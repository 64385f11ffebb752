"""Runs whose columns lie in TransferQueue's storage units: the real library, with Ray, on this machine."""

import subprocess
import sys

import pytest

from engine.errors import StoreError
from engine.orchestrator.column_store import TransferQueueStore
from engine.orchestrator.launch import launch_run as launch_here
from engine.run.files import read_lines
from engine.wire.columns import LOGPROBS
from support.runs import ROOT, Tree, config_of, send, wait_for, write_config
from support.transferqueue import ELSEWHERE, EXACT, MARKS, disturbed, reads
from support.whole_runs import run, same, steps, weights

pytestmark = MARKS
UNIT = "ray::SimpleStorageUnit"
CONTROLLER = "ray::TransferQueueController"


@pytest.fixture
def exact(settings):
    return settings | EXACT


def in_orchestrator(exact, folder):
    """Weights of the run whose groups lie in the orchestrator."""
    run(exact | {"run.name": "orchestrator", "train.mode": "sync"}, folder)
    return weights(folder, "orchestrator")


def parts(store, name):
    return [process for process, line in Tree(store.pid).command_lines() if name in line]


def test_runs_with_both_stores_are_bit_identical_and_the_orchestrator_reads_no_body(exact, tmp_path, monkeypatch):
    expected = in_orchestrator(exact, tmp_path)
    read = reads(monkeypatch)
    launch_here(config_of(exact | ELSEWHERE | {"run.name": "periodic"}))
    assert same(weights(tmp_path, "periodic"), expected)
    assert read == []


def test_a_killed_run_leaves_no_process_and_resumes_with_the_same_bits(exact, tmp_path):
    expected = in_orchestrator(exact, tmp_path)
    killed = exact | ELSEWHERE | {"run.name": "killed", "train.mode": "sync", "checkpoint.every": 1}
    config = write_config(killed, tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)], cwd=ROOT)
    try:
        wait_for(lambda: len(steps(tmp_path, "killed")) >= 1, "the first step", timeout_s=300)
        tree = Tree(process.pid)
    finally:
        process.kill()
        process.wait()
    assert any(UNIT in line for _, line in tree.command_lines())
    assert not tree.left(60)
    run(killed, tmp_path, "--resume", timeout_s=400)
    assert same(weights(tmp_path, "killed"), expected)
    assert [line["step"] for line in steps(tmp_path, "killed")] == [0, 1, 2]


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_groups_of_a_lost_storage_unit_are_generated_again_with_the_same_bits(exact, tmp_path, monkeypatch, signal):
    expected = in_orchestrator(exact, tmp_path)
    called = disturbed(monkeypatch, lambda store: send(parts(store, UNIT)[0], signal))
    launch_here(config_of(exact | ELSEWHERE | {"run.name": signal, "train.mode": "sync"}))
    assert same(weights(tmp_path, signal), expected)
    assert 0 < called[0].generated_again < 6  # of six: those of the unit, and not those of the other one


def test_a_lost_controller_ends_the_run_by_name_and_the_run_resumes(exact, tmp_path, monkeypatch):
    expected = in_orchestrator(exact, tmp_path)
    config = config_of(exact | ELSEWHERE | {"run.name": "controller"})
    disturbed(monkeypatch, lambda store: send(parts(store, CONTROLLER)[0], "SIGKILL"))
    with pytest.raises(StoreError, match=r"TransferQueue's controller has not answered within 15 s"):
        launch_here(config)
    assert [line["step"] for line in read_lines(config.folder / "steps.jsonl")] == [0]
    monkeypatch.undo()
    launch_here(config, resume=True)
    assert same(weights(tmp_path, "controller"), expected)


def test_a_group_of_which_a_column_changed_in_the_store_is_generated_again(exact, tmp_path, monkeypatch):
    expected = in_orchestrator(exact, tmp_path)
    read = reads(monkeypatch)
    kept = TransferQueueStore.put
    put = []

    async def damage(store, step, index, bodies):
        put.append((step, index))
        flipped = bytearray(bodies[LOGPROBS])
        flipped[len(flipped) // 2] ^= (step, index) == (1, 3) and put.count((1, 3)) == 1
        await kept(store, step, index, {**bodies, LOGPROBS: bytes(flipped)})

    monkeypatch.setattr(TransferQueueStore, "put", damage)
    launch_here(config_of(exact | ELSEWHERE | {"run.name": "flipped"}))
    assert same(weights(tmp_path, "flipped"), expected)
    assert put.count((1, 3)) == 2
    assert read.count((1, 3)) == 2  # the orchestrator saw the damage for itself, and read what had come again
    assert len(put) == 3 * 6 + 1
