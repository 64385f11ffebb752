import time
from dataclasses import replace

import pytest

from engine.orchestrator import run_events as module
from engine.orchestrator.run_events import RunEvents
from engine.types import Score
from engine.wire.columns import pack_response
from support.groups import numbered_group


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test adds them."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def sampled(length, finish_reason):
    """A packed response of so many tokens."""
    [response] = numbered_group(0).responses
    columns = {"token_ids": (5,) * length, "logprobs": (-1.0,) * length, "loss_mask": (True,) * length}
    return pack_response(replace(response, finish_reason=finish_reason, **columns))


def told(**options):
    lines = []
    return lines, RunEvents(lambda stage, text: lines.append(f"{stage}: {text}"), **options)


def test_a_share_is_told_with_its_sums_and_not_after_every_group(clock):
    lines, notices = told()
    for second in range(600):
        notices.share("responses", "responses were cut", count=1, of=8)
        notices.report_due()
        clock[0] += 1
        if second == 5:
            assert lines == []  # one group says little
    assert lines[0] == "responses: 11 of 88 responses were cut"
    assert 4 <= len(lines) <= 6  # pauses of 30, 60, 120, 240 s
    notices.close()
    assert lines[-1] == "responses: 600 of 4,800 responses were cut"


def test_the_counts_of_a_resumed_run_are_those_of_its_steps_too(clock):
    lines, notices = told()
    steps = [{"truncated": 3, "equal_groups": 2, "reward_timeouts": 1, "reward_errors": 0}] * 2
    notices.count_steps(steps, groups=4, size=3, max_new_tokens=16)
    notices.close()
    assert lines == []  # told before it was interrupted
    scores = [Score(0.0, "timeout", "late"), Score(0.0), Score(0.0)]
    notices.count_group([sampled(2, "length"), *[sampled(2, "stop")] * 2], scores, max_new_tokens=16)
    notices.close()
    assert lines == [
        "responses: 7 of 27 responses were cut at 16 tokens (max_new_tokens) or by the context",
        "rewards: 5 of 9 groups have equal scores and teach nothing (equal_groups)",
        "rewards: 3 of 27 scores timed out and count as 0: late",
    ]


def test_nothing_is_told_while_nothing_goes_wrong(clock):
    lines, notices = told()
    for _ in range(100):
        notices.share("responses", "responses were cut", count=0, of=8)
        notices.report_due()
        clock[0] += 1
    notices.close()
    assert lines == []


def test_a_burst_of_events_is_counted(clock):
    lines, notices = told()
    for number in range(512):
        notices.happened("instances", "leaves", f"instance-{number} is gone")
    assert lines == [f"instances: instance-{number} is gone" for number in range(module.BURST)]
    clock[0] += module.PAUSE_S + 1
    notices.report_due()
    assert lines[module.BURST :] == ["instances: instance-511 is gone (the last of 507 more such lines)"]
    notices.happened("instances", "leaves", "guest is gone")
    assert lines[-1] == "instances: guest is gone"
    notices.close()
    assert len(lines) == module.BURST + 2


def test_an_event_is_one_line(clock):
    lines, notices = told()
    notices.happened("instances", "fails", "i was ended by SIGKILL; its log i.log ends:\nTraceback\n  oops")
    assert lines == ["instances: i was ended by SIGKILL; its log i.log"]


def test_what_goes_wrong_in_a_group(clock):
    lines, notices = told()
    whole = sampled(2, "stop")
    scores = [Score(0.0, "timeout", "no score within 10 s"), Score(0.0, "error", "it raised"), Score(0.0)]
    notices.count_group([whole, sampled(2, "length"), sampled(1, "stop")], scores, max_new_tokens=48)
    notices.count_group([whole] * 3, [Score(1.0), Score(0.0), Score(1.0)], max_new_tokens=48)
    notices.close()
    assert lines == [
        "responses: 1 of 6 responses were cut at 48 tokens (max_new_tokens) or by the context",
        "responses: 1 of 6 responses are empty: they end with their first token",
        "rewards: 1 of 2 groups have equal scores and teach nothing (equal_groups)",
        "rewards: 1 of 6 scores timed out and count as 0: no score within 10 s",
        "rewards: 1 of 6 scores failed, count as 0: it raised",
    ]


def test_excluded_responses_are_told_as_such_and_make_no_scores_unequal(clock):
    lines, notices = told()
    scores = [
        Score(0.0, "timeout", "no score within 10 s", excluded=True),
        Score(0.0, "error", "it raised", excluded=True),
        Score(0.5, "ok", "no sandbox", excluded=True),
        Score(1.0),
    ]
    notices.count_group([sampled(2, "stop")] * 4, scores, max_new_tokens=48)
    notices.close()
    assert lines == [
        "rewards: 1 of 1 groups have equal scores and teach nothing (equal_groups)",
        "rewards: 1 of 4 scores timed out; their responses are excluded: no score within 10 s",
        "rewards: 1 of 4 scores failed; their responses are excluded: it raised",
        "rewards: 1 of 4 responses were excluded by their reward: no sandbox",
    ]


@pytest.mark.parametrize("samples", [1, 4])
def test_equal_scores_are_no_loss_in_an_evaluation(clock, samples):
    lines, notices = told(trained=False)
    notices.count_group([sampled(2, "stop")] * samples, [Score(1.0)] * samples, max_new_tokens=48)
    notices.close()
    assert lines == []
