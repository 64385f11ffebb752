"""Replies to /v1/completions that break the protocol: whatever is changed in a good one, nothing of it is taken."""

import copy
import json
import math
import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.orchestrator.pool.reply_check import ROUNDING, Asked, BrokenRule, check_reply
from engine.wire.rollout_messages import CompletionReply
from support.replies import reply

VOCABULARY = 50
STOPS = frozenset({48})
ENDS = frozenset({48, 49})
MOST = 12
ASKED = Asked(MOST, VOCABULARY, STOPS, ENDS)


@st.composite
def good_replies(draw):
    """Any that a right instance may send."""
    count = draw(st.integers(1, MOST))
    tokens = draw(st.lists(st.integers(0, 47), min_size=count, max_size=count))
    finish = draw(st.sampled_from(["stop", "length", "abort"]))
    if finish == "stop":
        tokens[-1] = draw(st.sampled_from(sorted(ENDS)))
    logprobs = draw(st.lists(st.floats(-9999, 0), min_size=count, max_size=count))
    starts = sorted({0} | set(draw(st.lists(st.integers(0, count - 1), max_size=3))))
    versions = [(start, draw(st.integers(0, 2**40))) for start in starts]
    return reply(tokens, logprobs, finish, versions)


def wrong(found):
    """What is wrong with a reply as the orchestrator reads it; "" if it is taken."""
    try:
        read = msgspec.json.decode(json.dumps(found).encode(), type=CompletionReply)
        check_reply(read, ASKED, 0, "instance-0")
    except (msgspec.DecodeError, BrokenRule) as error:
        return str(error)
    return ""


@given(good_replies())
@example(reply([], [], "abort", []))  # an aborted response may be empty
@example(reply([1], [ROUNDING / 2], "length", [(0, 0)]))
def test_a_good_reply_is_taken(found):
    assert wrong(found) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_is_a_finite_number_also_where_a_decoder_lets_others_pass(value):
    read = msgspec.convert(reply([1], [value], "length", [(0, 0)]), CompletionReply)
    with pytest.raises(BrokenRule, match="log-probability 0 is"):
        check_reply(read, ASKED, 0, "instance-0")


def tokens(change):
    def apply(found, draw):
        row = found["choices"][0]["token_ids"]
        row[draw.randrange(len(row))] = change

    return apply


def logprobs(change):
    def apply(found, draw):
        row = found["choices"][0]["logprobs"]["token_logprobs"]
        row[draw.randrange(len(row))] = change

    return apply


def versions(change):
    def apply(found, draw):
        count = len(found["choices"][0]["token_ids"])
        found["weight_versions"] = change(found["weight_versions"], count)

    return apply


def lengths(found, draw):
    choice = found["choices"][0]
    row = draw.choice([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
    row.append(row[0]) if draw.random() < 0.5 else row.pop()


def too_long(found, draw):
    choice = found["choices"][0]
    for row in (choice["token_ids"], choice["logprobs"]["token_logprobs"]):
        row[:0] = [row[0] if row[0] not in ENDS else 0] * (MOST + 1 - len(row))


def finish(reason):
    def apply(found, draw):
        choice = found["choices"][0]
        choice["finish_reason"] = reason
        if choice["token_ids"][-1] in ENDS:
            choice["token_ids"][-1] = 0

    return apply


def goes_on(found, draw):
    choice = found["choices"][0]
    choice["token_ids"][0] = 48
    choice["finish_reason"] = "abort" if len(choice["token_ids"]) == 1 else draw.choice(["length", "abort"])


def empty(found, draw):
    choice = found["choices"][0]
    choice["token_ids"] = []
    choice["logprobs"]["token_logprobs"] = []
    found["weight_versions"] = []
    choice["finish_reason"] = draw.choice(["stop", "length"])


def another(found, draw):
    found["choices"].append(copy.deepcopy(found["choices"][0]))


CHANGES = {
    **{f"token {value!r}": tokens(value) for value in (-7, VOCABULARY, 99999999, 2**40, 2**63, 2**64, 2**80, 1.5)},
    **{f"token {value!r}": tokens(value) for value in ("3", None, True, [1])},
    **{f"logprob {value!r}": logprobs(value) for value in (math.nan, math.inf, -math.inf, 0.5, 2 * ROUNDING, 1e300)},
    **{f"logprob {value!r}": logprobs(value) for value in ("-1", None, True)},
    "another length": lengths,
    "too long": too_long,
    "no versions": versions(lambda found, count: []),
    "versions from 1": versions(lambda found, count: [(start + 1, version) for start, version in found]),
    "versions twice": versions(lambda found, count: [*found, found[-1]]),
    "versions descend": versions(lambda found, count: [*found, (0, found[-1][1] + 1)]),
    "version past the end": versions(lambda found, count: [*found, (count, 7)]),
    "negative start": versions(lambda found, count: [(-1, 0), *found]),
    "negative version": versions(lambda found, count: [(0, -1), *found[1:]]),
    "huge version": versions(lambda found, count: [(0, 2**63), *found[1:]]),
    "version of no number": versions(lambda found, count: [(0, "3"), *found[1:]]),
    "one number": versions(lambda found, count: [(0,), *found[1:]]),
    "unknown finish": finish("eos"),
    "error finish": finish("error"),
    "no finish": finish(""),
    "stop without a stop token": finish("stop"),
    "goes on after a stop token": goes_on,
    "empty": empty,
    "two responses": another,
}


@pytest.mark.parametrize("what", CHANGES)
@settings(max_examples=25)
@given(found=good_replies(), seed=st.integers(0, 2**32))
def test_each_change_of_meaning_is_refused(what, found, seed):
    CHANGES[what](found, random.Random(seed))
    assert wrong(found), found
