"""State files after a power cut or a kill: each is read, or named in one sentence."""

import os
import shutil

import pytest

from engine.errors import BadInput, MetronomeError
from engine.orchestrator import in_run_evaluation
from engine.run.checkpoint_files import step_of
from engine.run.checkpoint_search import newest_whole
from engine.run.fence import Fence
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from engine.run.identity import claim_run_id, read_run_id
from engine.run.run_start import read_start
from engine.run.trace import Trace
from engine.tools.timeline import draw_timeline
from support.run_folders import finished, interrupted
from tasks.compare import from_folder
from tasks.finished_stages import Stages, count_attempt, last_end

STATE = {
    "config.toml",
    "run_id",
    "start.json",
    "orchestrator_attempt",
    "flow_attempt",
    "steps.jsonl",
    "attempts.jsonl",
    "evaluations.jsonl",
    "_SUCCESS.json",
    "state.json",
    ".metadata",
    "orchestrator.jsonl",
}


NAMED = {"config.toml", "run_id", "start.json", "orchestrator_attempt", "flow_attempt", "stages.json"}
"""Those that are refused when they are empty."""


def reads(path):
    """Read all that a flow, an orchestrator and its trainer read when they resume a run, and what shows it. The
    step."""
    folder = RunFolder(path)
    config = folder.read_config()
    last_end(folder)
    claim_run_id(path, config, resume=True)
    Fence.begin(path)
    Fence.begin(path, "flow")
    read_start(path)
    count_attempt(folder, "training", 99, "it was ended", by_hand=True)
    Stages(folder).once("train", lambda: 4)
    from_folder(path)
    folder.create(config, resume=True)
    found = newest_whole(folder.checkpoints, "", read_run_id(path), lambda line: None)
    step = 0 if found is None else step_of(found)
    folder.cut(step)
    in_run_evaluation.cut_evaluations(folder, step)
    trace = Trace(folder.trace, "orchestrator")
    trace.add("sync", 50.0, 51.0, step=step)
    trace.flush()
    append_line(folder.steps, {"step": step, "step_s": 1.0, "pool_size": 1})
    draw_timeline(path)
    from_folder(path)
    return step


def outcome(path):
    """The step with which a run goes on, or the sentence that refuses that."""
    try:
        return reads(path)
    except MetronomeError as error:
        return str(error)


@pytest.mark.parametrize("made", [finished, interrupted])
def test_every_state_file_may_be_torn(made, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a thousand of them take a minute
    whole = made(tmp_path).path
    files = [path for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    assert {path.name for path in files} >= STATE
    ends = {}
    for path in files:
        for length in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
            torn = tmp_path / "torn"
            shutil.rmtree(torn, ignore_errors=True)
            shutil.copytree(whole, torn)
            os.truncate(torn / path.relative_to(whole), length)
            ends[str(path.relative_to(whole)), length] = end = outcome(torn)
            assert isinstance(end, int) or ("\n" not in end and str(torn) in end), end
    newest = 4 if made is finished else 2
    for (name, length), end in ends.items():
        if name.startswith(f"checkpoints/step-00000{newest}/"):
            expected = end == 2 if newest == 4 else "no checkpoint of this run is intact" in end
        elif name in NAMED and not length:
            expected = isinstance(end, str)
        elif name in ("steps.jsonl", "attempts.jsonl", "evaluations.jsonl", "failure.json", "trace/orchestrator.jsonl"):
            expected = end == newest or (name == "steps.jsonl" and "no run with steps" in end)
        else:
            expected = True
        assert expected, (name, length, end)


def test_a_torn_line_is_left_out_and_removed_by_the_next_one(tmp_path):
    path = tmp_path / "lines.jsonl"
    for number in range(3):
        append_line(path, {"number": number, "text": "x" * 5000})
    os.truncate(path, path.stat().st_size - 3)
    assert [row["number"] for row in read_lines(path)] == [0, 1]
    append_line(path, {"number": 9})
    assert [row["number"] for row in read_lines(path)] == [0, 1, 9]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": NaN}\n{"b": \n{"c": 1}\n')
    with pytest.raises(BadInput, match=r"lines\.jsonl, line 2: it is damaged"):
        list(read_lines(path))
