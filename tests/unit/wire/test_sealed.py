"""What a group is after it was sealed, sent and opened; and what becomes of one whose bytes are damaged."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TransferError
from engine.types import BatchScores, Group, Landed, Prompt, Response, Score
from engine.wire.codec import PackedLanded, open_landed, open_response, pack_ids, pack_response
from engine.wire.messages import EarlyWork, Window, pack, read_message
from engine.wire.sealed import batch_scores, open_group, seal_group
from support.groups import numbered_group


def crossed(group, batch=None):
    window = read_message(pack(Window((seal_group(group),), batch)))
    return open_group(window.groups[0], window.batch)


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
        scores=tuple(Score(reward + number, "ok", "ñ") for number in range(len(made))),
    )
    sealed = seal_group(group)
    assert crossed(group) == group
    assert sealed.tokens == len(prompt) + sum(sealed.lengths)
    assert sealed.lengths == tuple(len(response.token_ids) for response in made)
    assert sealed.rewards == tuple(score.value for score in group.scores)
    assert [open_response(pack_response(response)) for response in made] == made


def test_half_a_character_crosses_as_a_question_mark():
    sent = dataclasses.replace(numbered_group(4), scores=(Score(1.0, "ok", "half \ud83d"),))
    assert crossed(sent).scores == (Score(1.0, "ok", "half ?"),)


def test_a_group_that_is_opened_with_a_tokenizer_has_its_texts():
    opened = open_group(seal_group(numbered_group(4)), decode=lambda token_ids: "-".join(map(str, token_ids)))
    assert [response.text for response in opened.responses] == ["5-6"]


def test_the_scores_of_a_batch_stand_in_the_order_of_its_groups_and_come_with_the_window():
    def scored(index, *rewards):
        (response,) = numbered_group(index).responses
        return dataclasses.replace(
            numbered_group(index),
            responses=(response,) * len(rewards),
            scores=tuple(map(Score, rewards)),
        )

    groups = [scored(1, 0.5, 0.0), scored(0, 1.0, 0.25)]
    scores = batch_scores(list(map(seal_group, groups)))
    assert scores == BatchScores(((1.0, 0.25), (0.5, 0.0)), ((2, 2), (2, 2)))
    assert crossed(groups[0], scores).batch == scores


def test_a_body_with_any_flipped_bit_is_refused_by_step_and_group():
    sealed = seal_group(numbered_group(4, step=7))
    for at in range(len(sealed.body)):
        flipped = bytearray(sealed.body)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(TransferError, match=r"step 7, group 4: \d+ bytes that are not those"):
            open_group(msgspec.structs.replace(sealed, body=bytes(flipped)))


def test_a_landed_response_crosses():
    packed = PackedLanded(step=0, group=3, number=1, prompt=pack_ids([1, 2, 3]), token_ids=pack_ids([5, 6]))
    (landed,) = read_message(pack(EarlyWork((packed,)))).landed
    assert open_landed(landed) == Landed(step=0, group=3, number=1, prompt=(1, 2, 3), token_ids=(5, 6))
    assert packed.tokens == 5
