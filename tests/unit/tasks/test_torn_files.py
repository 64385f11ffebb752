"""State files after a power cut, a kill or a damage: each is read, or named in one sentence."""

import os
import shutil

import pytest

from engine.data.prepared import training_problems
from engine.data.problem_statistics import read_report
from engine.errors import MetronomeError
from engine.evaluation.tables import awaited_versions, scores_by_version
from engine.orchestrator import in_run_evaluation
from engine.run.checkpoint_files import step_of
from engine.run.checkpoint_store import newest_whole
from engine.run.files import parse_object, read_lines
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.progress import read_progress
from engine.run.resume import check_continues
from engine.run.run_file import read_run
from engine.run.run_status import why_ended
from engine.run.served_model import weight_version
from engine.run.trace import Trace, read_spans
from engine.tools.watch.page import draw_page
from support.damages import damaged
from support.run_folders import add_line, finished, interrupted
from tasks.attempt import Stages, count_attempt
from tasks.cluster.flow_run import name_of
from tasks.commands.compare import from_folder
from tasks.stages import resume_checks
from tasks.stages.flow_entry import begun_by_this_flow
from tasks.stages.resume import find_resumed
from tasks.stages.summary import _figures
from tasks.tracking.evaluation_texts import closing_rows
from tasks.tracking.mirror import NewLines

STATE = {
    "config.toml",
    "run.json",
    "steps.jsonl",
    "evaluations.jsonl",
    "_SUCCESS.json",
    "state.json",
    ".metadata",
    "orchestrator.jsonl",
}


KINDS = {".json", ".jsonl", ".toml", ""}
NAMED = {"config.toml", "run.json"}
"""Those that are refused when they are empty."""


def reads(path):
    """Read all that a flow, an orchestrator and its trainer read when they resume a run, and what shows it. The
    step."""
    folder = RunFolder(path)
    config = folder.read_config()
    why_ended(folder)
    claim_run(config, resume=True)
    training_problems(config)
    count_attempt(folder, "training", 99, "it was ended", by_hand=True)
    Stages(folder).once("train", lambda: 4)
    from_folder(path)
    folder.create(config, resume=True)
    found = newest_whole(folder.checkpoints, "", read_run(path).id, lambda line: None)
    step = 0 if found is None else step_of(found)
    folder.cut_steps(step)
    in_run_evaluation.cut_evaluations(folder, step)
    trace = Trace(folder.trace, "orchestrator")
    trace.add_span("sync", 50.0, 51.0, step=step)
    trace.flush()
    add_line(folder.steps, step=step, step_s=1.0, pool_size=1)
    draw_page(path)
    from_folder(path)
    return step


def checks(path, config=None):
    """Read all that the check of a resume reads, and what shows a run. Writes nothing. The step of the state with which
    the run goes on. `config`: that of the run, which takes longest to read."""
    if config is None:
        config = find_resumed(None, [f"run.name={path.name}", f"run.output={path.parent}"]).config
    folder = RunFolder(path)
    resume_checks._check_files(folder)
    state = resume_checks._newest_state(config, folder)
    if state is not None:
        check_continues(config, state, state["inputs"], state["model"])
    begun_by_this_flow(folder)
    why_ended(folder)
    name_of(folder)
    read_progress(folder.progress)
    read_report(path)
    weight_version(folder.policy)
    NewLines(folder.steps).read()
    scores_by_version(folder)
    awaited_versions(folder, config, 3)
    closing_rows(folder)
    _figures(list(read_lines(folder.steps)))
    read_spans(folder.trace)
    return 0 if state is None else state["step"]


def outcome(path, reads=reads):
    """The step with which a run goes on, or the sentence that refuses that."""
    try:
        return reads(path)
    except MetronomeError as error:
        return str(error)


def is_told(end, path):
    """Whether an outcome is a step, or a sentence that names a file of the run, a changed key, or the problem set that
    a damaged key names."""
    return isinstance(end, int) or (
        "\n" not in end and (str(path) in end or end.startswith(("--resume: ", "problem set ")))
    )


def is_unseen(path, content):
    """Whether a damage is not seen: lines have no checksum, and each of these is still an object."""
    return path.suffix == ".jsonl" and all(parse_object(line) is not None for line in content.splitlines())


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
            assert is_told(end, torn), end
    newest = 4 if made is finished else 2
    for (name, length), end in ends.items():
        if name.startswith(f"checkpoints/step-00000{newest}/"):
            expected = end == 2 if newest == 4 else "no checkpoint of this run is intact" in end
        elif name in NAMED and not length:
            expected = isinstance(end, str)
        elif name in ("steps.jsonl", "evaluations.jsonl", "failure.json", "trace/orchestrator.jsonl"):
            expected = end == newest or (name == "steps.jsonl" and "no run with steps" in end)
        else:
            expected = True
        assert expected, (name, length, end)


def test_the_check_of_a_resume_names_every_damage(tmp_path):
    whole = finished(tmp_path).path
    config = RunFolder(whole).read_config()
    ends = {}
    for path in [path for path in sorted(whole.rglob("*")) if path.is_file() and path.suffix in KINDS]:
        content = path.read_bytes()
        known = None if path.name in ("config.toml", "run.json") else config
        for seed in range(68):
            path.write_bytes(hurt := damaged(content, f"{path.name} {seed}"))
            if is_unseen(path, hurt):
                continue
            end = outcome(whole, lambda folder, known=known: checks(folder, known))
            assert is_told(end, whole), (path.name, seed, end)
            ends.setdefault(str(path.relative_to(whole)), set()).add(end)
        path.write_bytes(content)
    needless = {"logs/notices.jsonl", "evaluations/dropped.jsonl", "data.json", "logs/progress.json"}
    assert needless <= ends.keys()
    for name in needless:
        assert ends[name] == {4}, name
    for name in ("_SUCCESS.json", "state.json"):
        assert ends[f"checkpoints/step-000004/{name}"] == {2}, name
        assert ends[f"checkpoints/step-000002/{name}"] == {4}, name
    told = ends["run.json"] - {4}  # a space less changes nothing
    assert told
    assert all("can't be read, because the file is damaged" in end for end in told)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_thousand_damages_give_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = finished(tmp_path).path
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    hurt = tmp_path / "hurt"
    for seed in range(10_000):
        name = names[seed % len(names)]
        content = damaged((whole / name).read_bytes(), seed)
        if is_unseen(name, content):
            continue
        shutil.copytree(whole, hurt)
        (hurt / name).write_bytes(content)
        for step in (checks, reads):
            end = outcome(hurt, step)
            assert is_told(end, hurt), (seed, name, end)
        shutil.rmtree(hurt)
