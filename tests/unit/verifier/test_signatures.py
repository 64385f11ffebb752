"""The three signatures of a reward: what each is called with, and what a function of none is told."""

import asyncio
import re
import sys
from dataclasses import replace

import pytest

from engine.errors import BadInput, RewardError
from engine.types import Prompt
from engine.verifier.reward_function import load_reward
from engine.verifier.worker import score_group
from support.verifier_calls import response

ROW = {
    "data_source": "openai/gsm8k",
    "question": "1+1=",
    "reward_model": {"style": "rule", "ground_truth": "two"},
    "extra_info": {"split": "train"},
}


@pytest.fixture
def load(tmp_path):
    def write(body):
        (tmp_path / "theirs.py").write_text(body)
        return load_reward(f"{tmp_path}/theirs.py:f")

    return write


def prompt(**columns):
    return Prompt("id", "1+1=", "2", (5, 6), columns=columns, text="1+1=")


def test_trl_gets_lists_with_an_entry_per_response_and_only_what_it_takes(load):
    reward = load("def f(prompts, completions, question, completion_ids, **kwargs): return [locals()] * 2")
    assert not reward.per_response
    found, _ = reward.call(prompt(**ROW), [response("a"), response("b")])
    assert (found["prompts"], found["completions"]) == (["1+1="] * 2, ["a", "b"])
    assert (found["question"], found["completion_ids"]) == (["1+1="] * 2, [[8, 9]] * 2)
    assert found["kwargs"]["answer"] == ["2", "2"]
    assert found["kwargs"]["prompt_ids"] == [[5, 6]] * 2
    reward = load("def f(completions, answer): return [c == a for c, a in zip(completions, answer)]")
    assert reward.call(prompt(answer="2"), [response("2"), response("3")]) == [True, False]
    reward = load("def f(completions, answer): return answer")
    assert reward.call(prompt(answer=[2, 3]), [response()]) == [[2, 3]]  # the data's, not its text


def test_trl_gets_messages_where_the_prompt_is_a_conversation(load):
    reward = load("def f(completions, prompts): return [(p[-1], c[0]) for p, c in zip(prompts, completions)]")
    user = {"role": "user", "content": "1+1="}
    assert reward.call(prompt(prompt=[user]), [response("2")]) == [(user, {"role": "assistant", "content": "2"})]


def test_trl_that_takes_a_column_that_no_row_has_says_which(load):
    reward = load("def f(completions, solution, **kwargs): return [1.0]")
    with pytest.raises(TypeError, match="it takes solution, but the row has only the columns question, level"):
        reward.call(prompt(question="1+1=", level=3), [response()])


def test_verl_is_called_for_each_response_with_the_row_as_its_data_has_it(load):
    reward = load("def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return locals()")
    assert reward.per_response
    assert reward.call(prompt(**ROW), response("x")) == {
        "data_source": "openai/gsm8k",
        "solution_str": "x",
        "ground_truth": "two",
        "extra_info": {"split": "train"},
        "kwargs": {},
    }
    reward = load("def f(solution_str, ground_truth, extra_info): return ground_truth, extra_info")
    assert reward.call(prompt(level=3), response()) == ("2", {"level": 3})


def test_each_signature_may_be_async(load):
    reward = load("async def f(solution_str, ground_truth): return solution_str == ground_truth")
    assert asyncio.run(reward.call(prompt(), response("2"))) is True


def test_an_async_function_of_one_response_waits_for_all_of_a_group_at_once(load):
    reward = load(
        "import asyncio\n"
        "both = asyncio.Barrier(2)\n"
        "async def f(solution_str, ground_truth):\n"
        "    await asyncio.wait_for(both.wait(), 10)\n"
        "    if solution_str == 'x': raise ValueError('no number')\n"
        "    return solution_str == ground_truth\n"
    )
    with asyncio.Runner() as runner:
        scores = score_group([reward], runner, prompt(), [response("2"), response("3")])
        assert [score.value for score in scores] == [1.0, 0.0]
        with pytest.raises(RewardError, match="no number"):
            score_group([reward], runner, prompt(), [response("x"), response("2")])


def test_several_async_functions_wait_at_once_and_the_first_that_fails_is_named(tmp_path):
    (tmp_path / "judges_of_one_reward.py").write_text(
        "import asyncio\n"
        "both, called = asyncio.Barrier(2), []\n"
        "async def meet(text):\n"
        "    await asyncio.wait_for(both.wait(), 10)\n"
        "    if 'x' in text: raise ValueError('no number')\n"
        "    return float(text)\n"
    )
    file = tmp_path / "theirs.py"
    file.write_text(
        "import judges_of_one_reward as judges\n"
        "async def f(solution_str, ground_truth): return await judges.meet(solution_str)\n"
        "async def g(completions): return [await judges.meet(completions[0].replace('y', 'x'))] * len(completions)\n"
        "def h(solution_str, ground_truth):\n"
        "    judges.called.append(solution_str)\n"
        "    return 100 / len(solution_str.replace('y', ''))\n"
    )
    rewards = [replace(load_reward(f"{file}:{name}"), name=name + str(at)) for at, name in enumerate("fhgh")]
    called = sys.modules["judges_of_one_reward"].called
    with asyncio.Runner() as runner:
        (score,) = score_group(rewards, runner, prompt(), [response("2")])
        assert list(score.metrics.items()) == [("f0", 2.0), ("h1", 100.0), ("g2", 2.0), ("h3", 100.0)]
        for text, error, count in (("x", r"f0 raised ValueError: no number", 4), ("1y", "f0 raised .* '1y'", 6)):
            with pytest.raises(RewardError, match=error):
                score_group(rewards, runner, prompt(), [response(text)])
            assert len(called) == count
        with pytest.raises(RewardError, match=r"g2 raised ValueError: no number"):
            score_group([*rewards[1:3], rewards[2]], runner, prompt(), [response("1y")])
        with pytest.raises(RewardError, match="h1 raised ZeroDivisionError"):  # those after it are not called
            score_group([rewards[1], *rewards], runner, prompt(), [response("y")])
        assert len(called) == 8


@pytest.mark.parametrize(
    "parameters",
    [
        "data, solution, truth",
        "solution, ground_truth",
        "prompts, responses",
        "prompt, *, responses",
        "prompt",
        "solution_str, judge",
        "",
    ],
)
def test_a_function_of_no_signature_is_refused_with_all_three(load, parameters):
    with pytest.raises(BadInput, match=r'reward.function = ".*theirs.py:f": its parameters are \(.*\)') as raised:
        load(f"def f({parameters}): pass")
    for signature in ("(prompt, responses)", "(prompts, completions, ", "(data_source, solution_str, ground_truth, "):
        assert signature in str(raised.value)


@pytest.mark.parametrize("parameters", ["p, rs", "prompt, responses, scale=1.0", "*arguments"])
def test_metronomes_own_may_have_any_other_names(load, parameters):
    assert load(f"def f({parameters}): return 1.0").call(None, None) == 1.0


ODD = """
import asyncio
class Odd:
    def __float__(self):
        raise ZeroDivisionError("no number")
def plain(completions): return [Odd() for _ in completions]
async def waits(completions): return plain(completions)
async def cancels(completions):
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return [1.0 for _ in completions]
async def is_cancelled(completions): raise asyncio.CancelledError
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("plain", "r returned a score that can't be read: ZeroDivisionError: no number"),
        ("waits", "r returned a score that can't be read: ZeroDivisionError: no number"),
        ("cancels", "an async function has cancelled tasks that are not its own"),
        ("is_cancelled", "r raised CancelledError"),
    ],
)
def test_whatever_a_score_or_a_function_does_is_an_error_of_the_reward(tmp_path, name, told):
    file = tmp_path / "odd.py"
    file.write_text(ODD)
    rewards = [replace(load_reward(f"{file}:{one}"), name=as_) for one, as_ in ((name, "r"), ("waits", "other"))]
    with asyncio.Runner() as runner, pytest.raises(RewardError, match=re.escape(told)):
        score_group(rewards, runner, prompt(), [response("1")])
