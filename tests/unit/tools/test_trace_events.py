"""A run's spans in the trace event format."""

import gzip
import json
from collections import defaultdict

import pytest
from typer.testing import CliRunner

from engine.run.trace import Trace
from flows.cli import app

KEYS = {
    "X": {"name", "ph", "ts", "dur", "pid", "tid", "args", "cat"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
"""What Google's "Trace Event Format" says of the three kinds of events that are written."""
NAMES = {"process_name", "process_sort_index", "thread_name"}


def events_of(file):
    """The events of a file, each of which has the form of its kind."""
    content = file.read_bytes()
    found = json.loads(gzip.decompress(content) if file.suffix == ".gz" else content)
    assert found["displayTimeUnit"] == "ms"
    for one in found["traceEvents"]:
        assert one.keys() == KEYS[one["ph"]]
        assert {type(one["pid"]), type(one["tid"])} == {int}
        assert min(one.get("ts", 0), one.get("dur", 0)) >= 0
        assert one["ph"] != "M" or one["name"] in NAMES
        assert one["ph"] != "C" or {type(value) for value in one["args"].values()} <= {int, float}
    return found["traceEvents"]


@pytest.fixture
def folder(tmp_path):
    trainer = Trace(tmp_path / "run/trace", "trainer-0")
    instance = Trace(tmp_path / "run/trace", "instance-0")
    for step in range(3):
        at = 1000.0 + 10 * step
        instance.add_span("rollout", at, at + 6, step=step, group=0, tokens=9)
        instance.add_span("rollout", at + 1, at + 3, step=step, group=1, tokens=4)
        trainer.add_span("train", at + 4, at + 7, step=step, groups=[1])
        trainer.add_span("update", at + 8, at + 9, step=step)
    instance.add_span("serving", 1000.0, 1012.0, lane="pool instance-0")
    trainer.flush()
    instance.flush()
    (tmp_path / "run/config.toml").write_text("")
    rows = [{"step": step, "reward_mean": step / 4, "pool_size": 1} for step in range(3)]
    (tmp_path / "run/steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "run"


def written(folder, steps="", out=None):
    done = CliRunner().invoke(
        app, ["trace", str(folder), "--steps", steps, *(("--out", str(out)) if out is not None else ())]
    )
    assert done.exit_code == 0, done.output
    return done.output


def test_a_trace_has_every_span_in_its_lane_and_the_figures_of_the_steps(folder):
    assert "13 spans" in written(folder)
    events = events_of(folder / "trace.json.gz")
    lanes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert list(lanes.values()) == ["trainer-0", "instance-0", "pool instance-0", "steps"]
    spans = [one for one in events if one["ph"] == "X"]
    first = next(one for one in spans if one["name"] == "train")
    assert (lanes[first["pid"]], first["ts"], first["dur"]) == ("trainer-0", 4e6, 3e6)
    assert first["args"] == {"step": 0, "groups": [1]}
    threads = defaultdict(list)
    for one in spans:
        threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    assert all(end <= start for own in threads.values() for (_, end), (start, _) in zip(own, own[1:], strict=False))
    rewards = [(one["ts"], one["args"]["reward_mean"]) for one in events if one["name"] == "reward_mean"]
    assert rewards == [(9e6, 0.0), (19e6, 0.25), (29e6, 0.5)]


def test_only_some_steps_and_what_happened_in_their_time(folder, tmp_path):
    written(folder, steps="1:1", out=tmp_path / "new/one.json")
    spans = [one for one in events_of(tmp_path / "new/one.json") if one["ph"] == "X"]
    assert {one["args"].get("step") for one in spans} == {1, None}
    assert [one["name"] for one in spans if "step" not in one["args"]] == ["serving"]


@pytest.mark.parametrize(
    ("steps", "told"), [("7:9", "has no spans of steps 7 to 9"), ("7", "expected FIRST:LAST, for example 10:19")]
)
def test_steps_that_are_not_there_are_bad_input(folder, steps, told):
    done = CliRunner().invoke(app, ["trace", str(folder), "--steps", steps])
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def profile(folder, name, events, base=1_000_000_000_000):
    """As torch's profiler writes it: times in microseconds from `baseTimeNanoseconds`."""
    file = folder / "profile" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode()))


def operator(name, at, process=7, thread=7):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": process, "tid": thread, "ts": at, "dur": 1e6, "args": {}}


def test_profiles_lie_on_the_axis_of_the_spans(folder, monkeypatch):
    named = {"ph": "M", "name": "thread_name", "ts": 0, "pid": 7, "tid": 7, "args": {"name": "python"}}
    other = [operator("Profiler", 5e6, "Spans", "Profiler"), {"ph": "i", "name": "end", "pid": "", "tid": "", "ts": 1}]
    profile(folder, "rank-0.json.gz", [named, operator("mm", 4.5e6), operator("long ago", -9e9), *other])
    profile(folder, "instance-0/worker.json.gz", [operator("add", 1.2e7)])
    assert "13 spans and 3 events of profiles" in written(folder)
    events = events_of(folder / "trace.json.gz")
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    (step,) = [one for one in events if one["name"] == "train" and one["args"]["step"] == 0]
    (matrix,) = [one for one in events if one["name"] == "mm"]
    assert step["ts"] < matrix["ts"] < matrix["ts"] + matrix["dur"] < step["ts"] + step["dur"]
    assert processes[matrix["pid"]] == "profile/rank-0.json.gz, 7"
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names[matrix["pid"], matrix["tid"]] == "python"
    assert {one["name"] for one in events if one.get("cat") == "cpu_op"} == {"mm", "add", "Profiler"}

    written(folder, steps="1:1", out=folder / "one.json")
    events = events_of(folder / "one.json")
    assert [one["name"] for one in events if one.get("cat") == "cpu_op"] == ["add"]

    monkeypatch.setattr("engine.tools.trace_events.PROFILE_MOST", 300)
    assert "rank-0.json.gz is too large to be put in" in written(folder)
    (folder / "profile/rank-0.json.gz").write_bytes(b"torn")
    done = CliRunner().invoke(app, ["trace", str(folder)])
    assert (done.exit_code, "rank-0.json.gz: the profile is damaged" in done.stderr) == (2, True), done.output
