"""What a group is after it was packed, sent and opened; and what becomes of one whose bytes are damaged."""

import copy
import dataclasses
import pickle
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BadInput, TransferError
from engine.types import BatchScores, Group, Prompt, Response, Score
from engine.wire.columns import (
    FLAGS,
    IDS,
    OWN,
    REALS,
    REFERENCE,
    JsonColumns,
    Numbers,
    batch_scores,
    open_group,
    open_response,
    open_scores,
    pack_group,
    pack_response,
)
from engine.wire.messages import Window, pack, read_message
from engine.wire.verifier_messages import make_score_call, score_arguments
from support.groups import numbered_group


def crossed(group, batch=None):
    window = read_message(pack(Window(0, (pack_group(group),), batch)))
    return open_group(window.rows[0], window.batch)


def without_texts(group):
    return dataclasses.replace(
        group, responses=tuple(dataclasses.replace(response, text="") for response in group.responses)
    )


def test_a_group_crosses_without_columns_and_texts():
    sent = numbered_group(4)
    with_columns = dataclasses.replace(sent, prompt=dataclasses.replace(sent.prompt, columns={"secret": object()}))
    assert crossed(with_columns) == without_texts(sent)


@st.composite
def responses(draw):
    count = draw(st.integers(0, 5))
    starts = sorted({0} | set(draw(st.lists(st.integers(0, 4), max_size=2)))) if count else []
    return Response(
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))),
        logprobs=tuple(draw(st.lists(st.floats(-9999, 0, width=32), min_size=count, max_size=count))),
        versions=tuple((start, draw(st.integers(0, 2**40))) for start in starts),
        loss_mask=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text="",
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        instance=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
    )


@given(st.lists(responses(), min_size=1, max_size=4), st.lists(st.integers(0, 9), max_size=4), st.floats(0, 1))
def test_every_number_of_every_response_crosses_and_stays_its_own(made, prompt, reward):
    group = Group(
        step=2,
        index=3,
        prompt=Prompt("id", "é", "2", tuple(prompt)),
        responses=tuple(made),
        scores=tuple(
            Score(reward + number, "ok", "ñ", correct=number == 0, metrics={"form": reward / 3})
            for number in range(len(made))
        ),
    )
    row = pack_group(group)
    opened = crossed(group)
    assert opened == group
    assert pack_group(opened) == row  # a view is packed as the tuples are
    assert row.tokens == len(prompt) + sum(row.lengths)
    assert row.lengths == tuple(len(response.token_ids) for response in made)
    assert row.names == frozenset(OWN)
    assert open_scores(row) == group.scores
    assert [open_response(pack_response(response)) for response in made] == made


def test_half_a_character_crosses_as_a_question_mark():
    sent = dataclasses.replace(numbered_group(4), scores=(Score(1.0, "ok", "half \ud83d"),))
    assert crossed(sent).scores == (Score(1.0, "ok", "half ?"),)


def test_the_scores_of_a_batch_stand_in_the_order_of_its_groups_and_come_with_the_window():
    def scored(index, *rewards):
        (response,) = numbered_group(index).responses
        return dataclasses.replace(
            numbered_group(index),
            responses=(response,) * len(rewards),
            scores=tuple(map(Score, rewards)),
        )

    groups = [scored(1, 0.5, 0.0), scored(0, 1.0, 0.25)]
    scores = batch_scores(list(map(pack_group, groups)))
    assert scores == BatchScores(((1.0, 0.25), (0.5, 0.0)), ((2, 2), (2, 2)), ((1, 1), (1, 1)))
    assert crossed(groups[0], scores).batch == scores


@pytest.mark.parametrize("name", [*OWN, REFERENCE])
def test_a_column_with_any_flipped_bit_is_refused_by_step_group_and_name(name):
    row = pack_group(dataclasses.replace(numbered_group(4, step=7), columns={REFERENCE: np.float32([-0.5, -2.0])}))
    column = row.column(name)
    for at in range(len(column.body)):
        flipped = bytearray(column.body)
        flipped[at] ^= 1 << at % 8
        damaged = row.with_columns([msgspec.structs.replace(column, body=bytes(flipped))])
        with pytest.raises(TransferError, match=rf"step 7, group 4: the \d+ bytes of its column '{name}' differ"):
            open_group(damaged)


def test_further_columns_cross_as_arrays_and_can_be_added_to_the_reward():
    columns = {REFERENCE: np.float32([-0.5, -2.0]), "bonus": np.array([0.25]), "picked": np.int64([[3]])}
    row = pack_group(dataclasses.replace(numbered_group(4), columns=columns))
    opened = open_group(row, reward_weights={"bonus": 2.0})
    assert list(opened.columns) == list(columns)
    for name, values in columns.items():
        assert (opened.columns[name].dtype, opened.columns[name].tolist()) == (values.dtype, values.tolist())
    assert [score.value for score in opened.scores] == [1.5]
    assert batch_scores([row], {"bonus": 2.0}) == BatchScores(((1.5,),), ((2,),), ((1,),))
    bare = open_group(row.only(["prompt", "responses"]))  # what a stage gets that needs no more
    assert (bare.scores, bare.responses[0].logprobs, bare.columns) == ((), (), {})


KINDS = {
    IDS: st.integers(-(2**31), 2**31 - 1),
    REALS: st.floats(width=32, allow_nan=False),
    FLAGS: st.booleans(),
}


@given(st.data())
def test_a_view_of_numbers_behaves_as_their_tuple(data):
    kind = data.draw(st.sampled_from(list(KINDS)))
    numbers = tuple(data.draw(st.lists(KINDS[kind], max_size=6)))
    view = Numbers(memoryview(struct.pack(f"={len(numbers)}{kind}", *numbers)), kind)
    assert (len(view), bool(view), hash(view), repr(view)) == (
        len(numbers),
        bool(numbers),
        hash(numbers),
        repr(numbers),
    )
    assert view == numbers == view
    assert view == list(numbers)
    assert view != (*numbers, 1)
    assert view != "numbers"
    assert [type(one) for one in view] == [type(one) for one in numbers]
    assert view + (7,) == (*numbers, 7)
    assert (7,) + view == (7, *numbers)
    assert pickle.loads(pickle.dumps(view)) == copy.deepcopy(view) == numbers
    cut = data.draw(st.slices(len(numbers)))
    assert view[cut] == numbers[cut]
    assert isinstance(view[cut], Numbers)
    assert view[cut] == Numbers(view[cut].view.tobytes(), kind)
    for at in range(-len(numbers), len(numbers)):
        assert view[at] == numbers[at]
        assert view.index(numbers[at]) == numbers.index(numbers[at])
    with pytest.raises(IndexError):
        view[len(numbers)]


NO_COLUMNS = {
    "no UTF-8": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "half a character": (b'{"a": "\xed\xa0\x80"}', "can't decode byte 0xed"),
    "UTF-16": ("{}".encode("utf-16-le"), "Expecting property name"),
    "too deep": (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "recursion"),
    "too many digits": (b'{"a": ' + b"1" * 5000 + b"}", "4300"),
    "no number of JSON": (b'{"a": NaN}', "NaN is no number of JSON"),
    "cut": (b'{"a": 1', "Expecting"),
    "a list": (b"[1]", "expected a JSON object"),
}


@pytest.mark.parametrize("name", NO_COLUMNS)
def test_columns_that_a_verifier_could_not_decode_are_refused_where_they_arrive(name):
    raw, said = NO_COLUMNS[name]
    with pytest.raises(BadInput, match=f"columns: .*{said}"):
        JsonColumns(raw)


def test_columns_arrive_at_a_reward_as_they_were_sent():
    raw = ' {"a": "\\ud800é", "n": [1, 2.5, null, 1e400]}'.encode()
    prompt = Prompt("p", "", "", (), columns=JsonColumns(raw))
    arrived, _ = score_arguments(make_score_call(prompt, (), text_only=False), lambda ids: "")
    assert arrived.columns == dict(prompt.columns) == {"a": "\ud800é", "n": [1, 2.5, None, float("inf")]}


def test_a_buffer_with_a_part_of_a_number_is_refused():
    with pytest.raises(ValueError, match="7 bytes are not a whole number of 4-byte numbers"):
        Numbers(b"1234567", IDS)
