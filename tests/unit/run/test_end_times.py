"""Lines of steps.jsonl and evaluations.jsonl have times by which trackers tell them apart."""

import time
from dataclasses import fields

from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.types import StepReport


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
