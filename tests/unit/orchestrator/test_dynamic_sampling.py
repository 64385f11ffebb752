import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import MetronomeError
from engine.orchestrator.dynamic_sampling import DynamicSampling, is_unequal
from engine.types import Group, Prompt, Score
from engine.wire.columns import open_group, pack_group
from support.groups import numbered_group


def group(number, unequal, excluded=False):
    response = numbered_group(number).responses[0]
    scores = (Score(1.0), Score(0.0 if unequal else 1.0, excluded=excluded))
    prompt = Prompt(f"prompt {number}", "", "", (1,))
    return pack_group(Group(step=7, index=number, prompt=prompt, responses=(response,) * 2, scores=scores))


def selected(verdicts, wanted, room, pick):
    """Try prompts as the producer does; `pick` says which group under way is finished next.
    (ids in order due, used, tried)."""
    selection = DynamicSampling(wanted, len(verdicts), step=7)
    due = []
    running = []
    tried = 0
    while not selection.complete:
        while selection.wants(tried, len(running), len(running) < room):
            running.append(tried)
            tried += 1
        number = running.pop(pick(len(running)))
        due += selection.add_group(group(number, verdicts[number]))
    return due, selection.used, tried


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_the_first_unequal_groups_in_prompt_order_are_kept_whenever_they_arrive_and_however_many_are_tried(
    verdicts, wanted, room, draw
):
    unequal = [number for number, verdict in enumerate(verdicts) if verdict]
    if len(unequal) < wanted:
        said = f"only {len(unequal)} of {len(verdicts)} prompts have .*train.prompts_per_step = {wanted} .*group_size"
        with pytest.raises(MetronomeError, match=f"step 7: {said}"):
            selected(verdicts, wanted, room, draw.randrange)
        return
    due, used, tried = selected(verdicts, wanted, room, draw.randrange)
    assert [open_group(one).prompt.id for one in due] == [f"prompt {number}" for number in unequal[:wanted]]
    assert [one.index for one in due] == list(range(wanted))
    assert used == unequal[wanted - 1] + 1 <= tried
    assert sum(verdicts[:tried]) < wanted + max(wanted, room)  # no more is thrown away than keeps the instances busy


def test_a_group_is_due_as_soon_as_all_prompts_before_it_are_decided():
    selection = DynamicSampling(2, 10)
    assert selection.add_group(group(2, True)) == []
    assert selection.add_group(group(0, False)) == []
    (first,) = selection.add_group(group(1, True))[:1]
    assert (open_group(first).prompt.id, first.index, selection.used) == ("prompt 1", 0, 3)


def test_as_many_are_tried_as_may_be_needed_and_more_to_keep_instances_busy():
    selection = DynamicSampling(3, 10)
    assert [selection.wants(0, flight, room=False) for flight in (0, 2, 3)] == [True, True, False]
    assert selection.wants(0, 3, room=True)
    assert not selection.wants(10, 0, room=True)  # the limit
    selection.add_group(group(4, True))
    assert [selection.wants(5, flight, room=False) for flight in (1, 2)] == [True, False]


def test_unequal_is_what_the_verifier_says():
    assert is_unequal(group(0, True))
    assert not is_unequal(group(0, False))
    assert not is_unequal(group(0, True, excluded=True))


@pytest.mark.parametrize(
    ("scores", "unequal"),
    [
        ([(0.2, False), (0.0, False)], False),  # all wrong, in different forms
        ([(1.2, True), (1.0, True)], False),
        ([(0.5, True), (0.5, False)], True),
        ([(0.2, None), (0.0, False)], True),  # not all are judged
    ],
)
def test_where_every_response_is_judged_the_verdicts_decide(scores, unequal):
    one = numbered_group(0)
    made = Group(
        0, 0, one.prompt, one.responses[:1] * 2, tuple(Score(value, correct=judged) for value, judged in scores)
    )
    assert is_unequal(pack_group(made)) == unequal
