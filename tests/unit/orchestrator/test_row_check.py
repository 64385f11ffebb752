"""A group from outside is checked as if an enemy had sent it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import xxhash

from engine.config import Config
from engine.errors import BadInput, StaleRolloutError
from engine.model.shape import Experts
from engine.orchestrator.experience import RowCheck
from engine.types import Score
from engine.wire.columns import OWN, RESPONSES, Column, pack_group, pack_values
from support.groups import numbered_group

CONFIG = Config(rollout={"group_size": 2, "max_new_tokens": 4, "max_context": 8}, train={"prompts_per_step": 3})
STEP = 5


@pytest.fixture
def check():
    return RowCheck(CONFIG, vocabulary=10)


def made(**changes):
    """A group of step 5, with changes of its responses."""
    group = numbered_group(1, STEP)
    response = replace(group.responses[0], **changes)
    return replace(group, responses=(response,) * 2, scores=group.scores * 2)


def flipped(row, name, at):
    column = row.column(name)
    body = bytearray(column.body)
    body[at] ^= 1
    return row.with_columns([Column(name, column.digest, bytes(body))])


def of_body(name, body):
    """A row with any body of a column, and its digest."""
    return pack_group(made()).with_columns([Column(name, xxhash.xxh3_128_digest(body), body)])


def test_a_whole_group_of_the_steps_version_passes(check):
    check.check_row(pack_group(made()), newest=STEP)


WRONG = {
    "another index": (lambda: replace(made(), index=3), "its index must be 0 to 2"),
    "a response missing": (
        lambda: replace(made(), responses=made().responses[:1], scores=made().scores[:1]),
        "it is incomplete: 1 responses and 1 scores, expected 2",
    ),
    "a score missing": (lambda: replace(made(), scores=made().scores[:1]), "incomplete: 2 responses and 1 scores"),
    "a metric that is not a number": (
        lambda: replace(made(), scores=(Score(1.0, metrics={"form": float("nan")}),) * 2),
        "a metric of a score is not finite",
    ),
    "a score above the bound": (lambda: replace(made(), scores=(Score(-1.1e6),) * 2), "larger than 1,000,000"),
    "an infinite score": (lambda: replace(made(), scores=(Score(float("inf")),) * 2), "a score is not finite"),
    "a foreign token": (lambda: made(token_ids=(5, 10)), "response 0: token 1 is 10, but the vocabulary has 10"),
    "no number as log-probability": (lambda: made(logprobs=(-1.0, float("nan"))), "log-probability 1 is nan"),
    "a probability above 1": (lambda: made(logprobs=(-1.0, 0.5)), "log-probability 1 is 0.5"),
    "a token without a version": (lambda: made(versions=((1, STEP),)), "do not name one version for each of 2 tokens"),
    "a version to come": (lambda: made(versions=((0, STEP + 1),)), "a weight version after 5"),
    "too long": (
        lambda: made(token_ids=(1,) * 5, logprobs=(-1.0,) * 5, loss_mask=(True,) * 5),
        "5 tokens, more than rollout.max_new_tokens = 4",
    ),
    "an aborted response": (lambda: made(finish_reason="abort"), "finish_reason 'abort'"),
    "fewer log-probabilities": (lambda: made(logprobs=(-1.0,)), "response 1: 2 tokens, 0 log-probabilities"),
    "a prompt that is too long": (
        lambda: replace(made(), prompt=replace(made().prompt, token_ids=(1,) * 8)),
        "its prompt has 8 tokens, expected 1 to 7",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_group_is_refused_by_name(check, name):
    make, message = WRONG[name]
    with pytest.raises(BadInput, match=f"step 5, group .*{message}"):
        check.check_row(pack_group(make()), newest=STEP)


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("name", OWN)
def test_a_flipped_byte_is_refused(check, name, at):
    with pytest.raises(BadInput, match=f"column '{name}' differ from those that were packed.*; send it again"):
        check.check_row(flipped(pack_group(made()), name, at), newest=STEP)


@pytest.mark.parametrize(
    "row",
    [
        pack_group(made()).only([RESPONSES]),
        pack_group(made()).with_columns([pack_values("more", np.ones(2))]),
        msgspec.structs.replace(pack_group(made()), columns=pack_group(made()).columns * 2),
    ],
    ids=["missing", "more", "twice"],
)
def test_columns_that_are_not_those_of_a_group_are_refused(check, row):
    with pytest.raises(BadInput, match=f"it has the columns .*; expected {', '.join(OWN)}"):
        check.check_row(row, newest=STEP)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1, 2]), b"\x91" * 10_000])
@pytest.mark.parametrize("name", OWN)
def test_a_body_that_is_no_column_is_refused(check, name, body):
    with pytest.raises(BadInput, match="a column is malformed"):
        check.check_row(of_body(name, body), newest=STEP)


@pytest.mark.parametrize("head", [{"tokens": 1}, {"lengths": (9, 9)}, {"mini_batch": 1}])
def test_a_head_that_is_not_the_columns_is_refused(check, head):
    with pytest.raises(BadInput, match="its tokens and lengths"):
        check.check_row(msgspec.structs.replace(pack_group(made()), **head), newest=STEP)


EXPERTS = Experts(count=4, per_token=2, intermediate=8, normalised=True, layers=(0, 1))


def routed(routes):
    """The group with the column of its routes, which may have a token that no instance has routed."""
    return pack_group(replace(made(), columns={"routes": routes}))


def some_routes():
    size = len(made().prompt.token_ids) + 4
    routes = np.tile(np.array([3, 1], np.uint8), (size, 2, 1))
    routes[-1] = 255
    return routes


def test_a_group_needs_the_routes_of_its_tokens_where_they_are_replayed(check):
    replaying = RowCheck(CONFIG, 10, EXPERTS)
    replaying.check_row(routed(some_routes()), newest=STEP)
    with pytest.raises(BadInput, match="it has the columns .*; expected .*, routes"):
        replaying.check_row(pack_group(made()), newest=STEP)
    with pytest.raises(BadInput, match="it has the columns .*, routes; expected"):
        check.check_row(routed(some_routes()), newest=STEP)
    foreign = some_routes()
    foreign[0, 0, 0] = 4
    for wrong, said in (
        (some_routes()[1:], r"routes uint8 \[.*\], expected uint8 \[.*, 2, 2\]"),
        (some_routes().astype(np.int64), "routes int64"),
        (foreign, "routes to expert 4, but the model has 4 in a layer"),
    ):
        with pytest.raises(BadInput, match=f"step 5, group .*: {said}"):
            replaying.check_row(routed(wrong), newest=STEP)


def test_a_stale_version_is_refused(check):
    with pytest.raises(StaleRolloutError, match="sampled from weight version 4, but mode 'periodic' accepts only 5"):
        check.check_row(pack_group(made(versions=((0, STEP - 1),))), newest=STEP)


def test_a_mode_with_staleness_takes_the_version_before():
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"mode": "one_step_off"})})
    RowCheck(config, 10).check_row(pack_group(made(versions=((0, STEP - 1),))), newest=STEP)
