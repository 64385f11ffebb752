"""run.json: what is written is read, damage is named with what to do; and two orchestrators of one run folder."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest

from engine.config import Config, Run
from engine.errors import BadInput, MetronomeError, TakenOver
from engine.orchestrator import launch
from engine.orchestrator.server import Server
from engine.run.files import read_lines, seal
from engine.run.folder import RunFolder
from engine.run.run_file import ATTEMPTS, FILE, Fence, RunFile, RunStart, read_run, update_run
from support.run_folders import a_checkpoint, finished, newer_attempt

NIGHT = RunStart(start="nightly", continued_from="models:/nights/6")


def test_what_is_written_is_read(tmp_path):
    assert read_run(tmp_path) == RunFile()
    part = {"named": "", "hash": "a", "path": "base"}
    written = update_run(tmp_path, id="a", began=1.5, start=NIGHT, inputs={"weights": part}, stages={"train": 4})
    Fence(tmp_path).begin_attempt("flow", "started", (1, 2), by_hand=True)
    found = read_run(tmp_path)
    assert (found.attempt, found.attempts[0].progress, found.began_at.year) == (1, (1, 2), 1970)
    assert update_run(tmp_path, attempts=()) == written


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", json.dumps(seal({"id": 1})), '{"id": "a", "checksum": "b"}'])
def test_damage_is_named_with_what_can_be_made_again(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    said = r"run\.json: .* can't be read, because the file is damaged .*id comes from its newest checkpoint, and its"
    with pytest.raises(BadInput, match=said):
        read_run(tmp_path)


def test_the_newest_attempts_are_kept_and_their_numbers_go_on(tmp_path):
    fence = Fence(tmp_path)
    for _ in range(ATTEMPTS + 3):
        fence.begin_attempt("training", "killed")
    kept = read_run(tmp_path).attempts
    assert (len(kept), kept[0].number, kept[-1].number) == (ATTEMPTS, 4, ATTEMPTS + 3)


def test_the_older_orchestrator_writes_nothing_more(tmp_path):
    folder = finished(tmp_path)
    steps = folder.steps.read_bytes()
    newer = RunFolder(folder.path)
    newer.fence = newer_attempt(folder.path)
    said = r"another attempt \(2\) writes it now; this one \(attempt 1\) stops"
    evaluations = folder.evaluations.read_bytes()
    writes = (
        lambda: folder.cut_steps(0),
        lambda: folder.add_step(None),
        lambda: folder.add_evaluation({}),
        lambda: folder.add_samples(9, []),
        folder.fence.check_attempt,
    )
    for write in writes:
        with pytest.raises(TakenOver, match=said):
            write()
    folder.write_failure(MetronomeError("taken over"))
    assert not folder.failure.exists()
    assert folder.steps.read_bytes() == steps
    assert folder.evaluations.read_bytes() == evaluations
    assert not (folder.responses / "step-000009.jsonl").exists()
    newer.cut_steps(2)
    assert len(list(read_lines(folder.steps))) == 2


def test_a_folder_that_was_begun_anew_is_not_the_older_orchestrators(tmp_path):
    for _ in range(2):
        older = newer_attempt(tmp_path)
    (tmp_path / FILE).unlink()
    newer_attempt(tmp_path).check_attempt()
    with pytest.raises(TakenOver, match=r"another attempt \(1\) writes it now; this one \(attempt 2\) stops"):
        older.check_attempt()


def test_no_checkpoint_is_published_over_the_newer_orchestrators(tmp_path, monkeypatch):
    from engine.run import checkpoint_files

    fence = newer_attempt(tmp_path)
    publish = checkpoint_files.publish_checkpoint
    monkeypatch.setattr(
        checkpoint_files, "publish_checkpoint", lambda **given: publish(**given, fence=fence.check_attempt)
    )
    whole = a_checkpoint(tmp_path, 2)
    content = (whole / "__0_0.distcp").read_bytes()
    newer_attempt(tmp_path)
    with pytest.raises(TakenOver):
        a_checkpoint(tmp_path, 4)
    assert (whole / "__0_0.distcp").read_bytes() == content
    assert not (tmp_path / "step-000004").exists()


async def test_a_orchestrator_stops_at_its_next_sign_of_life_also_where_no_step_ends(tmp_path):
    """It may be uploading: its trainer ends with it."""
    config = Config(run=Run(name="mine", output=str(tmp_path)))
    folder = RunFolder(config.folder)
    folder.create(config, resume=False)
    folder.fence = newer_attempt(folder.path)
    orchestrator = launch._Orchestrator(config, folder, resume=False, replay=None)
    server = Server(config)
    orchestrator._beating = asyncio.create_task(orchestrator._beat(server))
    plane = SimpleNamespace(check_run=partial(asyncio.sleep, 0), failure=None)
    waiting = asyncio.create_task(orchestrator._wait_for_trainer(SimpleNamespace(alive=True), server, plane))
    await asyncio.sleep(0.7)
    assert not waiting.done()
    newer_attempt(folder.path)
    with pytest.raises(TakenOver):
        await asyncio.wait_for(waiting, 5)


def test_a_process_without_a_orchestrator_is_not_fenced_off(tmp_path):
    newer_attempt(tmp_path)
    Fence(tmp_path, 0).check_attempt()
