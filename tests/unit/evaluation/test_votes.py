r"""Majority votes, with the real math verifier in its worker deciding which answers are equal."""

import random

import pytest

from engine.evaluation.intervals import majority_of
from engine.evaluation.votes import Majority, majority_votes
from engine.types import Group, Prompt, Response, Score
from support.verifier_calls import verifiers


def response(text):
    return Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text=text, seed=0, instance=""
    )


async def voted(texts, answer, reward="math"):
    """The vote over responses with these texts, scored by the verifier itself."""
    return (await voted_each([texts], answer, reward))[0]


async def voted_each(orders, answer, reward="math"):
    prompt = Prompt("id", "", answer, ())
    async with verifiers(reward) as verifier:
        groups = []
        for texts in orders:
            responses = tuple(map(response, texts))
            scores = tuple(await verifier.score(prompt, responses))
            groups.append(Group(step=0, index=0, prompt=prompt, responses=responses, scores=scores))
        return await majority_votes(groups, reward, verifier)


def boxed(*answers):
    return [f"so \\boxed{{{answer}}}" for answer in answers]


async def test_equal_answers_are_counted_together_however_they_are_spelled():
    right = boxed("\\frac{1}{2}", "0.5", "1/2", "3", "3", "\\frac{6}{2}")
    found = await voted([*right, "no answer at all"], "\\frac12")
    assert (found.votes, found.tied, found.value) == (3, 2, 0.5)  # three for 1/2, three for 3, one abstains
    wrong = await voted(boxed("0.25", "\\frac14", "\\frac{2}{8}", "\\frac12", "0.5"), "\\frac12")
    assert (wrong.answer, wrong.votes, wrong.tied, wrong.value) == ("0.25", 3, 1, 0.0)


@pytest.mark.parametrize(
    ("texts", "answer", "reward", "expected"),
    [
        # equality is not transitive: 50 and 0.5 both equal 50%, but not each other
        (boxed("7", "7", "50%", "50", "0.5"), "7", "math", Majority("0.5", 3, 1, 0.0)),
        (["#5", "#3", "#2"], "2", "exact", Majority("2", 1, 3, pytest.approx(1 / 3))),
    ],
)
async def test_the_order_of_the_responses_changes_no_vote(texts, answer, reward, expected):
    found = await voted_each([texts, texts[::-1], [*texts[:-2], texts[-1], texts[-2]]], answer, reward)
    assert found == [expected] * 3
    assert len({one.bootstrap for one in found}) == 1


@pytest.mark.parametrize(
    "texts",
    [
        boxed("5", "7", "7", "7"),
        ["The answer is 5.", "The answer is 7.", "Answer: 7", "7 is the answer"],
        ["\\boxed{5}", "So x = 7", "So x = 7", "<answer>7</answer>"],
        ["#### 5", "#### 7", "答案：7", "in all, 7."],
    ],
)
async def test_right_and_wrong_responses_vote_alike_however_they_state_their_answer(texts):
    """The reward and the vote read one answer in a text."""
    found = await voted(texts, "5")
    assert (found.votes, found.tied, found.value) == (3, 1, 0.0)


async def test_a_vote_of_marked_answers():
    assert await voted(["1+1#2", "#2", "#3", "#4"], "2", "exact") == Majority("2", 2, 1, 1.0)
    assert await voted(["#3", "#3", "#2", "#4"], "2", "exact") == Majority("3", 2, 1, 0.0)
    assert await voted(["#5", "#3", "#2"], "2", "exact") == Majority("2", 1, 3, pytest.approx(1 / 3))


async def test_the_drawn_majority_counts_silence_as_one_wrong_answer():
    """As verl's "[INVALID]": of 2, 2, 3 and a silent one, four drawn with replacement."""
    found = await voted(["#2", "#2", "#3", ""], "2", "exact")
    assert found.value == 1.0
    assert found.bootstrap == majority_of([2, 1, 1], 0)
    assert (await voted(["#3", "", "#3"], "2", "exact")).bootstrap == 0.0


async def test_a_response_without_a_score_is_neither_a_vote_nor_silence():
    texts = ["#2", "#3", "#3", "#2", ""]
    scores = (Score(1.0), Score(0.0), Score(0.0, excluded=True), Score(1.0), Score(0.0, excluded=True))
    prompt = Prompt("id", "", "2", ())
    group = Group(step=0, index=0, prompt=prompt, responses=tuple(map(response, texts)), scores=scores)
    (found,) = await majority_votes([group], "exact", None)
    assert found == Majority("2", 2, 1, 1.0)
    assert found.bootstrap == majority_of([2, 1], 0)


async def test_the_worth_of_a_tie_is_the_mean_over_draws_among_the_tied():
    draw = random.Random(0)
    for _ in range(20):
        answers = [str(draw.randrange(3)) for _ in range(5)]
        counts = {answer: answers.count(answer) for answer in answers}
        top = [answer for answer, count in counts.items() if count == max(counts.values())]
        prompt = Prompt("id", "", "1", ())
        scores = tuple(Score(float(answer == "1")) for answer in answers)
        group = Group(
            step=0, index=0, prompt=prompt, responses=tuple(response(f"#{answer}") for answer in answers), scores=scores
        )
        (found,) = await majority_votes([group], "exact", None)
        assert found.value == pytest.approx(top.count("1") / len(top))
        assert found.votes == max(counts.values())
