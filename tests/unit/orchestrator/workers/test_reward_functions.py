"""Several functions of one reward: the score, what is logged of each, and what their errors say."""

import pytest

from engine.config import Reward
from engine.config.recipe import load_config
from engine.errors import BadInput, RewardError
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.types import Score
from support.verifier_calls import PROMPT, response

JUDGES = """
from engine.reward import per_response
from engine.types import Score

def longest(completions, **columns):
    return [None if c == 'none' else {'score': len(c), 'chars': len(c)} for c in completions]

@per_response
async def right(prompt, response):
    return Score(float(response.text == prompt.answer), detail=response.text, correct=response.text == prompt.answer)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == 'broken':
        return float('nan')
    return {'score': 0.5, 'acc': 1.0}

def pleased(prompt, responses):
    return [Score(1.0, correct=True) for _ in responses]

def second(prompt, responses):
    found = {'late': Score(0.0, 'timeout'), 'left out': Score(1.0, excluded=True), 'wrong': Score(1.0, correct=False)}
    return [found.get(one.text, 1.0) for one in responses]

def twice(prompt, responses):
    return [{'score': 1.0, 'right': 1.0} for _ in responses]
"""


def pool_of(*functions, **settings):
    shown = ", ".join(functions)
    found = load_config(None, [f"reward.functions=[{shown}]", *(f"reward.{k}={v}" for k, v in settings.items())])
    return VerifierPool(found.reward)


@pytest.fixture
def file(reward):
    return reward(JUDGES).rpartition(":")[0]


async def test_the_score_is_the_weighted_sum_and_each_function_a_metric(file):
    terms = [
        f'{{function="{file}:right", weight=0.7}}',
        f'{{function="{file}:compute_score", weight=0.4, name="theirs"}}',
        f'{{function="{file}:longest", weight=0.1}}',
    ]
    async with pool_of(*terms) as pool:
        assert not pool.per_response
        assert await pool.score(PROMPT, [response("2"), response("none")]) == [
            Score(
                1.0,  # 0.7 + 0.4 · 0.5 + 0.1 · 1
                detail="right: 2",
                correct=True,
                metrics={"right": 1.0, "theirs": 0.5, "acc": 1.0, "longest": 1.0, "chars": 1.0},
            ),
            Score(0.2, detail="right: none", correct=False, metrics={"right": 0.0, "theirs": 0.5, "acc": 1.0}),
        ]
        with pytest.raises(
            RewardError, match=r"reward.functions = right, theirs, longest, prompt .*: theirs returned nan"
        ):
            await pool.score(PROMPT, [response("broken")])
    async with pool_of(*terms[:2], on_error='"exclude"') as pool:
        assert pool.per_response
        (score,) = await pool.score(PROMPT, [response("broken")])
        assert (score.status, score.excluded, score.metrics) == ("error", True, {})


async def test_a_response_to_which_no_function_applies_is_excluded(file):
    async with VerifierPool(Reward(function=f"{file}:longest")) as pool:
        found = await pool.score(PROMPT, [response("none"), response("two")])
        assert [(score.value, score.excluded) for score in found] == [(0.0, True), (3.0, False)]


async def test_what_one_function_says_of_a_response_the_others_do_not_outvote(file):
    async with pool_of(f'{{function="{file}:pleased"}}', f'{{function="{file}:second"}}') as pool:
        scores = await pool.score(PROMPT, list(map(response, ("late", "left out", "wrong", "not judged"))))
    assert [(score.status, score.excluded, score.correct) for score in scores] == [
        ("timeout", False, True),
        ("ok", True, True),
        ("ok", False, False),
        ("ok", False, True),
    ]


async def test_a_metric_has_the_name_of_no_function(file):
    async with pool_of(f'{{function="{file}:right"}}', f'{{function="{file}:twice"}}') as pool:
        with pytest.raises(RewardError, match="gives the metric right twice: rename it"):
            await pool.score(PROMPT, [response()])


async def test_built_in_rewards_add_up_too():
    async with pool_of('{function="math", weight=0.9}', '{function="exact", weight=0.1}') as pool:
        (score,) = await pool.score(PROMPT, [response("\\boxed{2}")])
        assert (score.value, score.metrics) == (0.9, {"math": 1.0, "exact": 0.0})


@pytest.mark.parametrize(
    ("functions", "correct"),
    [
        ([("math", 0.8), ("longest", 0.2)], True),  # 0.8 and more, but the answer is right
        ([("exact", 0.8), ("longest", 2)], False),  # more than 1, but it is wrong
        ([("math", 1), ("exact", 0)], True),  # what is only logged does not judge
        ([("math", 1), ("exact", 1)], False),
        ([("longest", 1)], None),
    ],
)
async def test_a_built_in_reward_among_several_says_what_is_correct(file, functions, correct):
    named = [(name if name in ("math", "exact") else f"{file}:{name}", weight) for name, weight in functions]
    async with pool_of(*(f'{{function="{name}", weight={weight}}}' for name, weight in named)) as pool:
        (score,) = await pool.score(PROMPT, [response("\\boxed{2}")])
        assert score.correct is correct


async def test_a_function_that_can_not_be_loaded_is_named(file):
    with pytest.raises(BadInput, match=r'reward.functions: function = ".*:absent": .* defines no absent'):
        async with pool_of('{function="math"}', f'{{function="{file}:absent"}}'):
            pass
