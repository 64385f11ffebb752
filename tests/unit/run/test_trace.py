"""How much of a run's trace and samples is kept, and the times of its lines."""

import time
from dataclasses import fields, replace

import pytest

from engine.config import Config
from engine.evaluation.tables import old_tables
from engine.run.files import append_line, read_lines
from engine.run.folder import RunFolder
from engine.run.trace import Trace, cut_spans, read_spans
from engine.types import Group, Prompt, Score, StepReport
from support.policies import response


def write(folder, steps, keep):
    trace = Trace(folder, "trainer-0", keep)
    trace.add_span("starting", 0.0, 1.0)
    for step in steps:
        trace.add_span("train", step, step + 1, step=step)
        trace.flush()


def steps_in(folder):
    return [span["step"] for span in read_spans(folder) if "step" in span]


@pytest.mark.parametrize(("keep", "first"), [(10, 80), (100, 0)])
def test_a_trace_keeps_the_newest_steps_and_at_most_twice_as_many(tmp_path, keep, first):
    write(tmp_path, range(55), keep)
    write(tmp_path, range(50, 95), keep)  # a resume, which repeats steps
    found = steps_in(tmp_path)
    assert found[-1] == 94
    assert min(found) == first
    assert set(found) == set(range(first, 95))


def test_a_damaged_trace_stops_no_run(tmp_path):
    (tmp_path / "trainer-0.jsonl").write_bytes(b"[]\n\xff\n")
    write(tmp_path, range(30), 10)
    assert steps_in(tmp_path)[-1] == 29


def test_the_spans_of_old_steps_are_cut_out_and_those_without_a_step_stay(tmp_path):
    write(tmp_path, range(20), 100)
    path = tmp_path / "trainer-0.jsonl"
    size = path.stat().st_size
    old = cut_spans(path, 15, dry=True)
    assert path.stat().st_size == size
    assert cut_spans(path, 15) == old == size - path.stat().st_size > 0
    assert steps_in(tmp_path) == list(range(15, 20))
    assert read_spans(tmp_path)[0]["name"] == "starting"


def test_the_samples_of_the_newest_steps_are_kept(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create(Config(), resume=False)
    for step in range(12):
        folder.add_samples(step, [], keep_steps=5)
    assert [step for step, _ in folder.all_samples()] == list(range(7, 12))
    folder.add_samples(12, [])
    assert len(folder.all_samples()) == 6


def test_tables_of_old_versions_go_but_not_those_that_others_are_compared_with(tmp_path):
    folder = RunFolder(tmp_path)
    folder.path.mkdir(exist_ok=True)
    (tmp_path / "evaluations").mkdir()
    for version in range(0, 60, 10):
        for samples in (1, 8):
            table = f"evaluations/aime-v{version}-{samples}.jsonl"
            (tmp_path / table).touch()
            row = {"weight_version": version, "protocol": {"samples": samples}, "in_run": version != 20}
            append_line(folder.evaluations, row | {"benchmark": "aime", "table": table})
    names = {path.name for path in old_tables(folder, 40)}
    assert names == {f"aime-v{version}-{samples}.jsonl" for version in (10, 30) for samples in (1, 8)}


def test_the_samples_of_a_conversation_have_its_turns(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create(Config(), resume=False)
    ids = tuple(b"2+2=<4>So 4")
    mask = (True,) * 4 + (False,) * 3 + (True,) * 4
    sampled = replace(response(ids, mask=mask), versions=((0, 0), (9, 1)))
    group = Group(step=0, index=0, prompt=Prompt("p", "", "4", ()), responses=(sampled,), scores=(Score(1.0),))
    folder.add_samples(step=0, groups=[group], decode=lambda part: bytes(part).decode())
    (sample,) = read_lines(folder.samples_of(0))
    assert sample["turns"] == [
        {"role": "model", "text": "2+2=", "trained": True, "tokens": 4, "versions": [0]},
        {"role": "environment", "text": "<4>", "trained": False, "tokens": 3},
        {"role": "model", "text": "So 4", "trained": True, "tokens": 4, "versions": [0, 1]},
    ]


def test_the_samples_have_advantages_and_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.run.folder.SAMPLED_TOKENS", 4)
    folder = RunFolder(tmp_path)
    folder.create(Config(), resume=False)
    plain = response(range(50, 55), [-0.5, 0.0, -1.23456, -2.0, -3.0], (True, False, False, True, True))
    sampled = replace(plain, versions=((0, 2), (3, 3)))
    group = Group(
        step=3, index=5, prompt=Prompt("p", "", "4", ()), responses=(sampled, sampled), scores=(Score(1.0),) * 2
    )
    folder.add_samples(3, [group], pieces=lambda ids: [chr(one) for one in ids], advantages={5: {1: -0.5}})
    first, second = read_lines(folder.samples_of(3))
    assert "advantage" not in first
    assert second["advantage"] == -0.5
    assert first["tokens"] == {
        "count": 5,
        "texts": ["2", "3", "4", "5"],
        "logprobs": [-0.5, 0.0, -1.2346, -2.0],
        "trained": [[0, 1], [1, 0], [3, 1]],
        "versions": [[0, 2], [3, 3]],
    }


def report(step):
    lists = {"versions_seen": [step], "memory_peak_gib": [1.0], "reward_metrics": {}}
    return StepReport(**{field.name: step for field in fields(StepReport)} | lists)


def test_a_line_ends_after_all_lines_before_it_whatever_the_clock_says(tmp_path, monkeypatch):
    """Also after a resume, of which each step that is redone ends after the step that it replaces."""
    clock = iter((100.0004, 100.0001, 50.0, 60.0, 200.0, 40.0, 41.0))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    first = RunFolder(tmp_path)
    for step in range(4):
        first.add_step(report(step))
    ended = [row["ended_s"] for row in read_lines(first.steps)]
    assert ended == [100.0, 100.001, 100.002, 100.003]
    resumed = RunFolder(tmp_path)
    resumed.cut_steps(2)
    resumed.add_step(report(2))
    resumed.add_step(report(3))
    assert [row["ended_s"] for row in read_lines(first.steps)] == [100.0, 100.001, 200.0, 200.001]
    RunFolder(tmp_path).add_evaluation({"weight_version": 0})
    monkeypatch.setattr(time, "time", lambda: 1.0)
    RunFolder(tmp_path).add_evaluation({"weight_version": 0})
    assert [row["ended_s"] for row in read_lines(first.evaluations)] == [41.0, 41.001]
