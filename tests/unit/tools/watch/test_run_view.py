"""What the page of a run is told: what is new, and in which state the run is."""

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from engine.errors import BadInput
from engine.run import trace
from engine.run.files import append_line
from engine.run.folder import RunFolder
from engine.run.lock import hold_lock
from engine.run.progress import Progress, write_progress
from engine.run.run_file import START, update_run
from engine.run.trace import Trace, last_spans, read_spans
from engine.tools.watch.run_view import RunView
from support.run_folders import EVALUATION


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.toml").write_text('[train]\nsteps = 4\nmode = "periodic"\n')
    for name in ("logs", "evaluations"):
        (tmp_path / name).mkdir()
    return RunFolder(tmp_path)


def steps(folder, *numbers, **figures):
    for number in numbers:
        append_line(folder.steps, {"step": number, "step_s": 2.0, "pool_size": 1, "reward_mean": 0.5} | figures)


def test_only_new_steps_are_told_and_a_file_that_was_cut_is_told_whole(folder):
    view = RunView(folder.path)
    assert view.steps()["columns"] == {}
    steps(folder, 0, 1)
    steps(folder, 2, kl=1e-9, memory_peak_gib=[1.0])
    told = view.steps()
    assert told["first"] == 0
    assert told["columns"]["step"] == [0, 1, 2]
    assert told["columns"]["kl"] == [None, None, 1e-9]
    assert "memory_peak_gib" not in told["columns"]
    steps(folder, 3)
    with folder.steps.open("a") as file:
        file.write('{"step": 4, "torn')
    new = view.steps(after=3, of=told["of"])
    assert (new["first"], new["columns"]["step"]) == (3, [3])
    folder.cut_steps(2)
    steps(folder, 2, 3, 4)
    again = view.steps(after=4, of=told["of"])
    assert (again["first"], again["columns"]["step"]) == (0, [0, 1, 2, 3, 4])


def test_a_file_system_with_large_inode_numbers_tells_no_step_twice(folder, monkeypatch):
    """A page's script has no numbers above 2**53 that are exact, so it would give back another one."""
    fstat = os.fstat
    large = 0x200000401000000 + 3

    def status(descriptor):
        found = list(fstat(descriptor))
        return os.stat_result([found[0], large, *found[2:]])

    monkeypatch.setattr(os, "fstat", status)
    steps(folder, 0, 1)
    view = RunView(folder.path)
    of = int(float(view.steps()["of"]))
    assert view.steps(after=2, of=of)["first"] == 2


def begin(folder, what="training", stages=(), flow_run=""):
    folder.fence.begin_attempt(what, START)
    update_run(folder.path, stages=dict.fromkeys(stages), flow_run=flow_run)


def test_the_state_is_that_of_the_folder(folder):
    view = RunView(folder.path)
    begin(folder)
    told = view.state()
    assert (told["state"], told["failure"].startswith("its process died without a message")) == ("died", True)
    program, *command = shlex.split(told["resume"])
    assert command == sets_of_resume("train", folder)
    (folder.logs / "orchestrator.log").write_text("2026-11-27 22:00:00.500 error: ended by SIGTERM\n")
    assert view.state()["failure"] == "ended by SIGTERM"
    with hold_lock(folder.lock, "it", 0.0):
        assert view.state()["state"] == "starting"
        steps(folder, 0, 1)
        told = view.state()
        assert (told["state"], told["done"], told["steps"], told["left_s"]) == ("running", 2, 4, 4.0)
        folder.failure.write_text(json.dumps({"error": "RewardError", "message": "no"}))
        assert view.state()["state"] == "ending"
    assert (view.state()["state"], view.state()["failure"]) == ("failed", "RewardError: no")
    folder.failure.write_text(json.dumps({"error": "Stopped", "message": "by SIGTERM"}))
    assert view.state()["state"] == "stopped"
    folder.failure.unlink()
    folder.policy.mkdir()
    assert view.state()["state"] == "died"
    steps(folder, 2, 3)
    with hold_lock(folder.lock, "it", 0.0):
        told = view.state(live=False)
    assert (told["state"], told["resume"], told["failure"]) == ("finished", "", "")


def sets_of_resume(command, folder):
    sets = (f"run.name={folder.path.name}", f"run.output={folder.path.parent}")
    return [command, "--resume", *(part for one in sets for part in ("--set", one))]


STAGES = ("prepare data", "evaluate version 0", "train", "publish", "announce")


@pytest.mark.parametrize(
    ("stages", "numbers", "word"),
    [(STAGES[:2], (), "died"), (STAGES[:3], range(4), "died"), (STAGES, range(4), "finished"), (STAGES, (0,), "died")],
)
def test_a_pipeline_is_finished_after_its_last_stage(folder, stages, numbers, word):
    """It has evaluated, and later trained, before that; its train.steps may have been raised since."""
    begin(folder, "flow", stages, flow_run="any")
    append_line(folder.evaluations, EVALUATION)
    steps(folder, *numbers)
    if numbers:
        folder.policy.mkdir()
    told = RunView(folder.path).state()
    assert told["state"] == word
    assert shlex.split(told["resume"])[1:] == ([] if word == "finished" else sets_of_resume("run", folder))


def test_a_folder_of_an_evaluation_says_so(folder):
    append_line(folder.evaluations, EVALUATION)
    told = RunView(folder.path).state()
    assert (told["state"], told["steps"], told["resume"]) == ("evaluated", 0, "")


def test_a_pipeline_that_trains_its_first_groups_runs(folder):
    with hold_lock(folder.lock, "it", 0.0):
        write_progress(folder.progress, Progress("4 of 8 groups trained", 0.01))
        assert RunView(folder.path).state()["state"] == "running"


def test_of_each_count_the_newest_notice_is_shown_and_of_other_notices_all(folder):
    texts = ["116 of 622 responses were cut", "instance-0 joined", "1 of 8 groups have equal scores: all 0"]
    texts += ["741 of 1,600 responses were cut", "instance-0 joined", "2 of 9 groups have equal scores: all 1"]
    for text in texts:
        folder.add_notice("rewards", text)
    shown = [row["text"] for row in RunView(folder.path).rest()["notices"]]
    assert shown == ["instance-0 joined", *texts[3:]]


def test_the_responses_of_an_evaluation_are_conversations(folder):
    """From before the first step on."""
    response = {"text": "5", "answer": "5", "score": 0.0, "status": "ok", "finish_reason": "stop", "tokens": 2}
    rows = [{"prompt_id": str(n), "problem": f"{n}+1", "answer": str(n + 1), "responses": [response]} for n in range(9)]
    append_line(folder.evaluations, EVALUATION | {"table": "evaluations/one.jsonl", "weight_version": 0})
    for row in rows:
        append_line(folder.path / "evaluations/one.jsonl", row)
    folder.samples_of(2).parent.mkdir()
    append_line(folder.samples_of(2), {"problem": "1+1="})
    view = RunView(folder.path)
    assert view.rest()["sampled"] == ["heldout, version 0", "2"]
    assert (view.samples("2"), view.samples("3")) == ([{"problem": "1+1="}], [])
    shown = view.samples("heldout, version 0")
    assert len(shown) == 8
    assert (shown[1]["problem"], shown[1]["answer"], shown[1]["response"], shown[1]["detail"]) == ("1+1", "2", "5", "5")


def test_a_watched_run_can_be_entered(folder, monkeypatch):
    """A run that starts while the state is read finds the lock taken for an instant."""
    folder.lock.touch()
    monkeypatch.setattr("engine.run.lock.LOOK_S", 0.001)
    going = Event()
    view = RunView(folder.path)
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(lambda: [view.state() for _ in iter(going.is_set, True)])
        try:
            for _ in range(100):
                with hold_lock(folder.lock, "it", 0.0):
                    pass
        finally:
            going.set()
        assert watching.result()


def test_the_last_steps_are_those_of_the_whole_trace(folder, monkeypatch):
    monkeypatch.setattr(trace, "TAIL", 64 * 500)
    for role in ("orchestrator", "trainer-0"):
        own = Trace(folder.trace, role)
        for step in range(40):
            own.add_span("train", 10.0 * step, 10.0 * step + 5, step=step)
            own.add_span("serving", 10.0 * step, 10.0 * step + 9, lane="pool instance-0")
        own.flush()
    newest = [span for span in read_spans(folder.trace) if span["start"] >= 350.0]
    assert last_spans(folder.trace, 35) == newest
    assert last_spans(folder.trace, -3) == read_spans(folder.trace)
    steps(folder, *range(40))
    shown = RunView(folder.path).timeline(whole=False)
    assert sorted(step for *_, step, _ in shown["spans"] if step is not None) == [36, 36, 37, 37, 38, 38, 39, 39]
    history = RunView(folder.path).rest()["pool"]["instances"]["instance-0"]
    assert [(state, start, end) for state, start, end in history] == [("serving", 0.0, 399.0)]


def test_a_damaged_line_is_named(folder):
    folder.steps.write_text('{"step": \n')
    view = RunView(folder.path)
    for _ in range(2):
        with pytest.raises(BadInput, match=r"steps\.jsonl, line 1"):
            view.state()
    folder.trace.mkdir()
    (folder.trace / "orchestrator.jsonl").write_text("{\n")
    with pytest.raises(BadInput, match=r"orchestrator\.jsonl: a line near its end is damaged"):
        last_spans(folder.trace, 0)


def test_it_writes_nothing(folder):
    steps(folder, 0)
    before = sorted(os.listdir(folder.path))
    view = RunView(folder.path)
    for read in (view.state, view.steps, view.rest, lambda: view.timeline(True), lambda: view.samples("0")):
        read()
    assert sorted(os.listdir(folder.path)) == before
