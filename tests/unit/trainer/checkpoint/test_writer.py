"""Checkpoints of one process are written beside the training, never look whole when they aren't,
and the right ones are kept."""

import json
import os
import shutil
import threading
from concurrent.futures import wait

import pytest
import torch

from engine.errors import DeadlineError, MetronomeError, TakenOver
from engine.run import checkpoint_files as files
from engine.run.files import append_line
from engine.run.run_file import update_run
from support.checkpoint_pairs import assert_same, builder, save, train
from support.run_folders import newer_attempt

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def build(settings, tmp_path):
    return builder(settings, tmp_path)


def hold(monkeypatch):
    """Writing waits until the returned event is set."""
    from engine.trainer.checkpoint.checkpoints import Snapshot

    go = threading.Event()
    write = Snapshot.write_data
    monkeypatch.setattr(Snapshot, "write_data", lambda *arguments: (go.wait(30), write(*arguments))[1])
    return go


def test_training_goes_on_while_files_are_written(build, monkeypatch):
    policy, checkpoints = build()
    train(policy, 1)
    go = hold(monkeypatch)
    before = {name: p.detach().clone() for name, p in policy.models.policy.named_parameters()}
    checkpoints.save(1)
    train(policy, 2)
    checkpoints.poll()
    assert files.latest_checkpoint(checkpoints._root) is None
    with pytest.raises(DeadlineError, match=r"waited 0 s for checkpoint step-000001 to be written"):
        checkpoints.finish(0.1)
    go.set()
    checkpoints.finish(30)
    other, again = build()
    assert again.resume() == 1
    for name, p in other.models.policy.named_parameters():
        assert torch.equal(p, before[name])


def test_a_failed_write_fails_the_next_call_by_name(build, monkeypatch):
    from engine.trainer.checkpoint.checkpoints import Snapshot

    def full(*arguments):
        raise OSError(28, "No space left on device", "__0_0.distcp")

    policy, checkpoints = build()
    train(policy, 1)
    monkeypatch.setattr(Snapshot, "write_data", full)
    for call in (checkpoints.poll, lambda: checkpoints.save(2), lambda: checkpoints.finish(5)):
        checkpoints.save(1)
        assert not wait([checkpoints._pending.done], 30).not_done
        with pytest.raises(
            MetronomeError, match=r"checkpoint step-000001 could not be saved: .*No space left.*__0_0\.distcp"
        ):
            call()
    assert list(files.incomplete_checkpoints(checkpoints._root).values()) == [
        "checkpoint step-000001 is incomplete (no _SUCCESS.json), ignored"
    ]


def test_a_trainer_that_was_taken_over_uploads_nothing_and_leaves_what_the_newer_one_writes(
    build, tmp_path, monkeypatch
):
    place = tmp_path / "published"
    policy, checkpoints = build(checkpoint__path=str(place))
    checkpoints._fence = newer_attempt(tmp_path)
    train(policy, 1)
    go = hold(monkeypatch)
    checkpoints.save(1)
    newer_attempt(tmp_path)
    go.set()
    with pytest.raises(TakenOver):
        checkpoints.finish(30)
    assert not place.exists()
    newer = files.partial_of(files.folder_of(checkpoints._root, 2))
    newer.mkdir(parents=True)
    (newer / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(TakenOver):
        checkpoints.save(2)
    assert (newer / "__0_0.distcp").read_bytes() == b"half"


def test_ranks_that_do_not_write_are_named(tmp_path):
    from engine.trainer.checkpoint.checkpoints import Snapshot

    taken = Snapshot(str(tmp_path))
    taken.world = 4
    for rank in (0, 3):
        files.write_json(tmp_path / f"written-{rank:05d}.json", [])
    with pytest.raises(DeadlineError, match=r"trainer ranks \[1, 2\] have not written their part of .* within 0 s"):
        taken.gather(0.1)


def test_a_failed_publication_fails_the_next_call_by_name(build, tmp_path):
    (tmp_path / "file").touch()
    policy, checkpoints = build(checkpoint__path=str(tmp_path / "file"))
    with pytest.raises(
        MetronomeError, match=r"step-000001 could not be saved: .*publishing the checkpoint to .*/file/run"
    ):
        save(checkpoints, 1)
    assert files.is_complete(checkpoints._root / "step-000001")


def test_the_last_and_those_with_the_best_evaluations_are_kept_whatever_their_rewards(build, tmp_path):
    policy, checkpoints = build(checkpoint__keep_last=1, checkpoint__keep_best=2, evaluate__every=1)
    (checkpoints._root / ".step-000002.partial").mkdir(parents=True)
    rewards = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7, 5: 0.2, 6: 0.3}
    own = {"in_run": True, "model": "base", "protocol": {"samples": 1}}
    append_line(tmp_path / "evaluations.jsonl", {"weight_version": 1, "avg_at_k": 1.0, **own, "model": "another"})
    for step, reward in rewards.items():  # an evaluation begins once its checkpoint is there
        save(checkpoints, step, reward_mean=reward)
        append_line(tmp_path / "evaluations.jsonl", {"weight_version": step, "avg_at_k": 1 - reward, **own})
    assert sorted(os.listdir(checkpoints._root)) == ["step-000002", "step-000005", "step-000006"]
    assert files.step_of(files.latest_checkpoint(checkpoints._root)) == 6
    save(checkpoints, 6)  # taken already
    assert files.read_marker(checkpoints._root / "step-000006")["figures"] == {"reward_mean": 0.3}
    save(build()[1], 6)  # but not by this run
    assert files.read_marker(checkpoints._root / "step-000006")["figures"] == {}


def test_a_lost_run_folder_resumes_from_where_it_was_published(build, tmp_path, capsys):
    place = tmp_path / "published"
    kept = {"checkpoint__path": str(place), "checkpoint__keep_last": 2}
    policy, checkpoints = build(**kept)
    for step in (1, 2, 3):
        train(policy, step)
        save(checkpoints, step)
    assert sorted(os.listdir(place / "run")) == ["step-000002", "step-000003"]
    other, elsewhere = build(root=tmp_path / "elsewhere", **kept)
    assert elsewhere.resume() == 3
    assert_same(policy, other)
    assert files.is_complete(tmp_path / "elsewhere/step-000003")
    (place / "run/step-000003/__0_0.distcp").write_bytes(b"cut")
    assert build(root=tmp_path / "third", **kept)[1].resume() == 2
    assert f"checkpoint {place}/run/step-000003: __0_0.distcp has 3 bytes" in capsys.readouterr().out
    assert build(root=tmp_path / "fourth")[1].resume() is None


def test_another_run_of_the_name_neither_takes_nor_loses_checkpoints_in_the_shared_place(build, tmp_path, capsys):
    """Two run folders with numbers of their own, one place."""
    place = tmp_path / "published"
    kept = {"checkpoint__path": str(tmp_path / "published"), "checkpoint__keep_last": 1, "train__steps": 100}
    pairs = {}
    numbers = {"first": "1", "second": "2"}
    for name, number in numbers.items():
        update_run(tmp_path / name, id=number)
        pairs[name] = build(root=tmp_path / name / "checkpoints", **kept)
    for name, step in (("first", 100), ("second", 5), ("second", 10)):
        save(pairs[name][1], step)
    assert sorted(os.listdir(place / "run")) == ["step-000010", "step-000100"]
    assert json.loads((place / "run/step-000010" / files.MARKER).read_text())["run"] == numbers["second"]
    shutil.rmtree(tmp_path / "second/checkpoints")
    assert build(root=tmp_path / "second/checkpoints", **kept)[1].resume() == 10
    with pytest.raises(
        MetronomeError, match=r"step-000010 .*has a checkpoint of another run, which is not overwritten"
    ):
        save(build(root=tmp_path / "first/checkpoints", **kept | {"checkpoint__keep_last": 3})[1], 10)
    assert json.loads((place / "run/step-000010" / files.MARKER).read_text())["run"] == numbers["second"]
