import json
from collections import Counter

import pytest

from engine.run.trace import Trace, read_spans
from engine.tools import timeline
from engine.tools.timeline import lane_text, lanes_of, legend_entries, overlapped_steps, rows_of, whole_run


def span(lane, name, start, end, **attributes):
    return {"lane": lane, "name": name, "start": start, "end": end, **attributes}


def step(number, start, first_train):
    """One step of 10 s: rollouts until 6 s after its start, training from `first_train` s on."""
    return [
        span("trainer-0", "sync", start, start + 0.5, step=number),
        span("instances", "sync", start + 0.1, start + 0.4, step=number),
        span("instance-0", "rollout", start + 1, start + 6, step=number, group=0),
        span("instance-0", "rollout", start + 1, start + 3, step=number, group=1),
        span("verifier", "verify", start + 3, start + 3.1, step=number, group=1),
        span("trainer-0", "train", start + first_train, start + first_train + 1, step=number, group=1),
        span("trainer-0", "update", start + 9, start + 9.5, step=number),
    ]


EVALUATION = [span("instance-0", "rollout", start, start + 5, step=0) for start in (-20, 30)]


@pytest.mark.parametrize(
    ("spans", "overlaps"),
    [
        (step(0, 0, 4) + step(1, 10, 7), {0: True, 1: False}),
        (EVALUATION[:1] + step(0, 0, 7) + EVALUATION[1:], {0: False}),  # its rollouts are no overlap
        (step(0, 0, 4)[:-1], {}),  # it was not finished
    ],
)
def test_overlap_is_training_before_the_last_rollout_of_a_step_ends(spans, overlaps):
    assert overlapped_steps(spans) == overlaps


def test_overlapping_spans_get_rows_of_their_own_and_rows_are_used_again():
    spans = [span("i", "rollout", start, end) for start, end in [(0, 4), (1, 2), (2, 3), (2.5, 5), (4, 6)]]
    assert rows_of(spans) == [0, 1, 1, 2, 0]


def test_lanes_are_ordered_by_role():
    ordered = [
        "trainer-0",
        "scorer-reference-0",
        "instance-0",
        "instance-1",
        "instances",
        "pool instance-0",
        "verifier",
    ]
    assert lanes_of([span(lane, "train", 0, 1) for lane in ["zebra", *ordered[::-1]]]) == [*ordered, "zebra"]


@pytest.fixture
def data(tmp_path):
    trace = Trace(tmp_path, "orchestrator")
    for number in range(10):
        for each in step(number, 10 * number, 4 if number else 7):
            trace.add_span(**each)
    trace.flush()
    return whole_run(tmp_path, {number: 2 - number // 8 for number in range(9)})


def test_every_lane_and_span_is_there_and_the_overlap_is_told(data, tmp_path):
    assert [name for name, _ in data["lanes"]] == ["trainer-0", "instance-0", "instances", "verifier"]
    assert len(data["spans"]) == len(read_spans(tmp_path)) == 70
    assert "In 9 of 10 steps (90%)" in data["summary"]
    assert [start for _, start, _ in data["steps"]] == [10.0 * number for number in range(10)]
    assert [size for _, _, size in data["steps"]] == [2] * 8 + [1, None]  # the last step was not finished
    left, right = data["window"]
    assert 30 < right - left < 33  # it opens on three steps


def test_each_lane_and_colour_has_a_meaning(data):
    said = dict(data["legend"])
    assert {kind["name"] for kind in data["kinds"]} <= said.keys()
    for name, _ in data["lanes"]:
        assert lane_text(name) in said.values()
    assert lane_text("trainer-3 bubble") != lane_text("trainer-3") != lane_text("instance-0")
    assert lane_text("pool instance-0").startswith("the state")
    assert lane_text("a-guest-of-another-host") == lane_text("instance-0")
    assert "frozen model" in lane_text("scorer-reference-0")
    assert legend_entries(["instance-0", "instance-1"], []) == [("instance-0 … instance-1", lane_text("instance-0"))]


def many(folder, steps, responses):
    """The trace of a run: so many responses a step, on 64 instances, trained in windows of 32."""
    for number in range(steps):
        start = 10.0 * number
        own = [
            span("trainer-0", "sync", start, start + 0.5, step=number),
            span("trainer-0", "update", start + 9, start + 9.5, step=number),
        ]
        own += [span("trainer-0", "train", start + 4, start + 5, step=number) for _ in range(responses // 32)]
        for response in range(responses):
            lane = f"instance-{response % 64}"
            own.append(span(lane, "rollout", start + 1, start + 6, step=number, group=response // 16))
            own.append(span("verifier", "verify", start + 6, start + 6.1, step=number, group=response // 16))
        with (folder / "orchestrator.jsonl").open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in own)


def test_a_long_run_has_every_span_where_the_page_opens_and_one_bar_for_many_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 1000)
    many(tmp_path, steps=20, responses=64)
    data = whole_run(tmp_path, {})
    rollouts = Counter(step for _, _, kind, _, _, step, _ in data["spans"] if kind == "rollout")
    verified = Counter(step for _, _, kind, _, _, step, _ in data["spans"] if kind == "verify")
    assert set(rollouts.values()) == {64}  # one for each instance
    assert Counter(verified.values()) == {1: 15, 64: 5}
    assert "In 20 of 20 steps (100%)" in data["summary"]
    assert data["end"] == 199.5


def test_many_lanes_and_steps_share_bars_and_none_reaches_over_the_steps_that_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SPANS", 1000)
    monkeypatch.setattr(timeline, "MOST_BARS", 500)
    many(tmp_path, steps=60, responses=64)
    data = whole_run(tmp_path, {})
    bars = [(kind, start, start + length, step) for _, _, kind, start, length, step, _ in data["spans"]]
    first, last = data["window"]
    outside = [bar for bar in bars if not first - 10 <= bar[1] <= last + 10]
    assert 250 < len(outside) <= 500 + 2 * 64
    assert not [bar for bar in outside if bar[1] < first and bar[2] > last]
    for kind, count in (("rollout", 60), ("sync", 60)):
        assert min(start for name, start, _, _ in bars if name == kind) < 10
        assert max(end for name, _, end, _ in bars if name == kind) > 10 * (count - 1)
    assert Counter(step for kind, _, _, step in bars if kind == "rollout")[30] == 64  # where the page opens
