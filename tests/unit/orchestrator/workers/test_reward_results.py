"""What a reward may return, and what follows when it returns or does something else."""

import psutil
import pytest

from engine.errors import RewardError
from engine.types import Score
from support.verifier_calls import PROMPT, response, verifiers

NUMBERS = {  # what a reward returns for four responses
    "(1, True, numpy.float32(0.5), Score(-2.0, detail='why'))": [1.0, 1.0, 0.5, Score(-2.0, "ok", "why")],
    "[numpy.bool_(True), numpy.int8(-3), numpy.float16(0.5), numpy.array(2)]": [1.0, -3.0, 0.5, 2.0],
    "[Fraction(1, 4), Decimal('0.125'), Score(numpy.bool_(False)), Score(Decimal(2))]": [0.25, 0.125, 0.0, 2.0],
    "numpy.array([1, 0, 1, 0]) == 1": [1.0, 0.0, 1.0, 0.0],
    "torch.tensor([1.0, 0.5, 0.0, -1.0], dtype=torch.bfloat16)": [1.0, 0.5, 0.0, -1.0],
    "[torch.tensor(2), torch.tensor(True), torch.tensor([0.5]), torch.ones(1, requires_grad=True)[0]]": [
        2.0,
        1.0,
        0.5,
        1.0,
    ],
    "(number for number in (1, 0, -1e6, -1e-320))": [1.0, 0.0, -1e6, -1e-320],
    "[1, Score(math.nan, 'error', 'the sandbox is down', True), Score(None, excluded=True), 0]": [
        1.0,
        Score(0.0, "error", "the sandbox is down", excluded=True),
        Score(0.0, excluded=True),
        0.0,
    ],
    "[Score(0.5, correct=numpy.bool_(True), metrics={'form/a': torch.tensor(2)}), {'score': True}, "
    "{'reward': 0.5, 'acc': False, 'pred': '7', 'why': None}, 0]": [
        Score(0.5, correct=True, metrics={"form/a": 2.0}),
        1.0,
        Score(0.5, detail="pred: 7", metrics={"acc": 0.0}),
        0.0,
    ],
}


async def test_a_reward_may_return_whatever_python_numpy_and_torch_call_a_number(reward):
    spec = reward(
        "import math, numpy, torch\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "from engine.types import Score\ndef reward(prompt, responses): return eval(responses[0].text)"
    )
    async with verifiers(spec, timeout_s=60) as pool:
        for text, expected in NUMBERS.items():
            scores = await pool.score(PROMPT, [response(text)] * 4)
            assert scores == [one if isinstance(one, Score) else Score(one) for one in expected], text
            assert {type(score.value) for score in scores} == {float}


WRONG = {
    "raise ValueError('no such thing')": r"raised ValueError: no such thing \(.*user_reward\.py, LINE\)",
    "return int('x')": r"raised ValueError: invalid literal.*user_reward\.py, LINE",
    "import json; json.loads('{')": r"raised JSONDecodeError: .*user_reward\.py, LINE\)",
    "return [1.0]": "returned 1 scores for 2 responses",
    "return 1.0": "returned float, expected a list of 2 scores",
    "return None": "returned NoneType, expected a list of 2 scores",
    "return 'no'": "returned str, expected a list of 2 scores",
    "return [1.0, None]": "returned None for response 1",
    "return ['1', 1]": "returned '1' for response 0, expected a number from -1,000,000 to 1,000,000, a Score, or",
    "return [{'value': 1.0}, 1]": "returned a dict with the keys value for response 0, expected the score under one of "
    "the keys score and reward",
    "return [{'score': 1.0, 'reward': 1.0}, 1]": "a dict with the keys score, reward for response 0",
    "return [{'score': [1.0]}, 1]": r"returned \[1.0\] for response 0",
    "return [{'score': 1.0, 'all': [1]}, 1]": r"returned \[1\] as the metric all of response 0, expected a number",
    "return [{'score': 1.0, 'a b': 1}, 1]": "returned a metric named 'a b' for response 0; a name has letters, digits",
    "return [{'score': 1.0, 'a' * 101: 1}, 1]": "returned a metric named 'aaa.*; a name has .*, at most 100, ",
    "return [{'score': 1.0, 'a': 1, 'a_std': 2}, 1]": "a metric named 'a_std' for .*, and does not end in _std",
    "from engine.types import Score; return [1, Score(1, metrics={'x': float('nan')})]": "nan as the metric x of resp",
    "from engine.types import Score; return [1, Score(1, metrics=[1])]": r"returned \[1\] as the metrics of response 1",
    "return [b'1', 1]": "returned b'1' for response 0",
    "return [[1.0], 1]": r"returned \[1.0\] for response 0",
    "return [1j, 1]": "returned 1j for response 0",
    "return b'10'": "returned bytes, expected a list of 2 scores",
    "return {1.0, 0.0}": "returned set, expected a list of 2 scores",
    "return {1.0: 0, 0.0: 1}": "returned dict, expected a list of 2 scores",
    "import numpy; return numpy.ones((2, 2))": r"returned array\(\[1., 1.\]\) for response 0",
    "import numpy; return numpy.float64(1)": "returned float64, expected a list of 2 scores",
    "return [1, 10**400]": "returned 1000+ for response 1",
    "return [1, 10**5000]": "returned a number of type int with too many digits for response 1",
    "return [1, 3.4028236e38]": r"returned 3.4028236e\+38 for response 1",
    "return [1, 1e6 + 1]": "returned 1000001.0 for response 1, expected a number from -1,000,000 to 1,000,000",
    "return [1.0, float('nan')]": "returned nan for response 1",
    "raise ValueError('x' * 10**7)": "raised ValueError: x{19000,20000}… \\(9,98.,... more",
    "return [{'score': 1} | {str(10**98 + n): 1 for n in range(700000)}, 1]": "scores of .* bytes with their metr",
    "return [float('inf'), 0]": "returned inf for response 0",
    "import os; os._exit(3)": "its process exited with 3",
    "import sys; sys.exit(4)": r"raised SystemExit: 4 \(.*user_reward\.py, LINE\)",
    "raise KeyboardInterrupt('by hand')": "raised KeyboardInterrupt: by hand",
    "import asyncio; raise asyncio.CancelledError": "raised CancelledError",
    "return (1 / (1 - index) for index in range(2))": "raised ZeroDivisionError",
    "import os; os.kill(os.getpid(), 11)": "its process was ended by SIGSEGV",
}


async def test_wrong_rewards_stop_with_the_reason(reward):
    body = "".join(f"    if responses[0].text == {body!r}:\n        {body}\n" for body in WRONG)
    spec = reward(f"def reward(prompt, responses):\n{body}")
    async with verifiers(spec, timeout_s=60) as pool:
        for index, (body, message) in enumerate(WRONG.items()):
            with pytest.raises(RewardError, match=message.replace("LINE", f"line {3 + 2 * index}")) as raised:
                await pool.score(PROMPT, [response(body), response()])
            assert f'reward.function = "{spec}", prompt 0123456789abcdef: ' in str(raised.value)


@pytest.mark.parametrize("choice", ["zero", "exclude"])
@pytest.mark.parametrize("body", ["raise ValueError('no')", "return [1.0, 2.0]", "import os; os._exit(3)"])
async def test_wrong_reward_may_score_zero_or_exclude_its_responses(reward, body, choice):
    spec = reward(
        f"def reward(prompt, responses):\n    if responses[0].text == 'wrong':\n        {body}\n    return [1.0]\n"
    )
    async with verifiers(spec, on_error=choice) as pool:
        (score,) = await pool.score(PROMPT, [response("wrong")])
        assert (score.value, score.status, score.excluded) == (0.0, "error", choice == "exclude")
        assert "prompt 0123456789abcdef" in score.detail
        assert await pool.score(PROMPT, [response()]) == [Score(1.0)]


async def test_a_time_out_may_exclude_its_responses_or_stop_the_run(reward):
    spec = reward(
        "import time\nfrom engine.reward import per_response\n@per_response\ndef reward(prompt, response):\n"
        "    time.sleep(60 if '7' in response.text else 0)\n    return 1.0"
    )
    async with verifiers(spec, timeout_s=0.5, on_timeout="exclude") as pool:
        scores = await pool.score(PROMPT, [response("6"), response("7"), response("8")])
        assert [(score.status, score.excluded) for score in scores] == [("ok", False), ("timeout", True), ("ok", False)]
    async with verifiers(spec, timeout_s=0.5, on_timeout="stop") as pool:
        with pytest.raises(RewardError, match=r"user_reward.*prompt 0123456789abcdef: no score within 0.5 s"):
            await pool.score(PROMPT, [response("7")])


async def test_a_time_out_of_a_built_in_reward_may_stop_the_run():
    async with verifiers("exact", timeout_s=0.3, on_timeout="stop") as pool:
        guardian = psutil.Process(pool._workers[0]._child.process.pid)
        for process in guardian.children():
            process.suspend()
        with pytest.raises(RewardError, match=r'reward.function = "exact", prompt .*: no score within 0.3 s'):
            await pool.score(PROMPT, [response()])
