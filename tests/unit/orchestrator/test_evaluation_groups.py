"""The figures of a second verifier, with the real math-verify in its worker."""

from dataclasses import replace

import pytest

from engine.config import Config
from engine.orchestrator.evaluation_groups import further_figures
from engine.types import Prompt, Score
from support.groups import group


def answered(answer, *texts, rewards):
    made = group(0, 0, rewards=rewards, statuses=("ok",) * len(rewards))
    responses = tuple(replace(one, text=text) for one, text in zip(made.responses, texts, strict=True))
    return replace(made, prompt=Prompt("p", "", answer, ()), responses=responses, scores=tuple(map(Score, rewards)))


async def test_math_verify_alone_is_reported_beside_the_reward():
    """It takes an anagram for the answer, as a product of letters; our verifier does not. Both read 1/2 as 0.5."""
    groups = [
        answered("cab", "so \\boxed{abc}", "so \\boxed{cab}", rewards=(0.0, 1.0)),
        answered("0.5", "\\boxed{\\frac12}", "I can't say", rewards=(1.0, 0.0)),
    ]
    found = await further_figures(Config(evaluate={"also": ["math_verify"]}), groups)
    assert found["math_verify_avg_at_k"] == pytest.approx(0.75)
    assert found["math_verify_pass_at_k"] == 1.0
    assert found["math_verify_ci_low"] < 0.75 < found["math_verify_ci_high"]
    assert found["math_verify_differs"] == 1
    assert await further_figures(Config(), groups) == {}
