"""Runs whose columns lie in TransferQueue's storage units: the real library, with Ray, on this machine."""

import pytest
from msgspec.structs import replace

from engine.errors import StoreError
from engine.orchestrator.launch import launch_run as launch_here
from engine.orchestrator.transferqueue import TransferQueueStore
from engine.run.files import read_lines
from engine.wire.columns import LOGPROBS
from support.runs import Tree, config_of, send, wait_for
from support.transferqueue import ELSEWHERE, EXACT, MARKS, disturbed
from support.whole_runs import orchestrating, run, same, steps, weights

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


def test_runs_with_both_stores_are_bit_identical(exact, tmp_path):
    expected = in_orchestrator(exact, tmp_path)
    launch_here(config_of(exact | ELSEWHERE | {"run.name": "periodic"}))
    assert same(weights(tmp_path, "periodic"), expected)


def test_a_killed_run_leaves_no_process_and_resumes_with_the_same_bits(exact, tmp_path):
    expected = in_orchestrator(exact, tmp_path)
    killed = exact | ELSEWHERE | {"run.name": "killed", "train.mode": "sync", "checkpoint.every": 1}
    with orchestrating(killed, tmp_path) as (process, _):
        wait_for(lambda: len(steps(tmp_path, "killed")) >= 1, "the first step", timeout_s=300)
        tree = Tree(process.pid)
    assert any(UNIT in line for _, line in tree.command_lines())
    assert not tree.left(60)
    run(killed, tmp_path, "--resume", timeout_s=400)
    assert same(weights(tmp_path, "killed"), expected)
    assert [line["step"] for line in steps(tmp_path, "killed")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("part", "signal", "said"),
    [
        (UNIT, "SIGKILL", "TransferQueue was asked to return the columns .* step 1, and (failed|did not answer)"),
        (UNIT, "SIGSTOP", r"TransferQueue was asked to return the columns .* step 1, and did not answer within 15 s"),
        (CONTROLLER, "SIGKILL", r"TransferQueue was asked to return the columns .* step 1, and (failed|did not)"),
    ],
)
def test_a_lost_part_ends_the_run_by_name_and_the_run_resumes_with_the_same_bits(
    exact, tmp_path, monkeypatch, part, signal, said
):
    expected = in_orchestrator(exact, tmp_path)
    config = config_of(exact | ELSEWHERE | {"run.name": "lost", "train.mode": "sync"})
    disturbed(monkeypatch, lambda store: [send(one, signal) for one in parts(store, part)])
    with pytest.raises(StoreError, match=said):
        launch_here(config)
    assert [line["step"] for line in read_lines(config.folder / "steps.jsonl")] == [0]
    monkeypatch.undo()
    launch_here(config, resume=True)
    assert same(weights(tmp_path, "lost"), expected)


def test_a_column_that_changed_in_the_store_ends_the_run_by_name(exact, tmp_path, monkeypatch):
    kept = TransferQueueStore._put

    async def damage(store, row, columns):
        flipped = bytearray(row.column(LOGPROBS).body)
        flipped[len(flipped) // 2] ^= (row.step, row.index) == (1, 3)
        changed = [replace(one, body=bytes(flipped)) if one.name == LOGPROBS else one for one in columns]
        await kept(store, row, changed)

    monkeypatch.setattr(TransferQueueStore, "_put", damage)
    said = "bytes of the columns logprobs of group 3, step 1 differ from those that were stored"
    with pytest.raises(StoreError, match=said):
        launch_here(config_of(exact | ELSEWHERE | {"run.name": "flipped"}))
