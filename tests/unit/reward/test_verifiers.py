import json
import os
import time

import pytest

from engine.reward.verifiers import exact, math
from engine.types import Prompt, Response
from support.statements import NOT_STATED, STATED
from support.verdicts import score


def prompt(answer: str) -> Prompt:
    return Prompt("id", "problem", answer, ())


def response(text: str) -> Response:
    return Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text=text, seed=0, instance=""
    )


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("579", "5+9+0=41;2+7+1=01;#579", 1.0),
        ("579", "5+9+0=41;#579\n", 1.0),
        ("579", "#578 no, #579", 1.0),
        ("579", "work\n#### 579", 1.0),
        (" 579 ", "579", 1.0),
        ("579", "so it is\n 579 \n\n", 1.0),
        ("579", "#975", 0.0),
        ("579", "#0579", 0.0),
        ("579", "579#", 0.0),
        ("579", "579\nor 580", 0.0),
        ("579", "", 0.0),
        ("579", "#", 0.0),
    ],
)
def test_exact(answer, text, value):
    assert exact(prompt(answer), response(text)).value == value


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [  # what is taken for the answer; which answers are equal is tested with pairs, in reward/math
        ("142.0", r"so \boxed{142}", 1.0),
        ("142.0", "The answer is 142.", 1.0),
        ("25", "The final answer is $25$.", 1.0),
        (r"\boxed{60}", "Therefore the answer is 60", 1.0),
        (r"so it is \boxed{(1,2)}, as was to be shown", r"\boxed{(1, 2)}", 1.0),
        (r"\boxed{\text{two lines}}", r"\boxed{\text{two lines}}", 1.0),
        (r"\boxed{1, 2}", r"\boxed{2, 1}", 1.0),
        ("5", r"First \boxed{4}, but on second thought \boxed{5}.", 1.0),
        ("5", r"\boxed{5} and then an unfinished \boxed{4", 1.0),
        ("5", r"\boxed{\boxed{5}}", 1.0),
        ("142.0", r"\boxed{143}", 0.0),
        ("25", r"\boxed{25}, no: \boxed{26}", 0.0),
        ("25", r"25 is it: \boxed{}", 0.0),
        ("25", r"\boxed{24, 25}", 0.0),
        ("25", r"\boxed{24 \text{ or } 25}", 0.0),
        ("7", "I don't know.", 0.0),
        ("7", "", 0.0),
        ("7", "\\boxed{", 0.0),
    ],
)
def test_math_takes_the_last_box_or_the_final_expression(answer, text, value):
    assert math(prompt(answer), response(text)).value == value


def test_statements_without_a_box_are_rewarded_if_they_state_the_answer():
    verdicts = {(*pair, 1): score(*pair) for pair in STATED} | {(*pair, 0): score(*pair) for pair in NOT_STATED}
    assert [case for case, value in verdicts.items() if case[2] != value] == []


def test_of_a_long_response_without_a_box_the_end_is_read():
    text = f"There were 7 apples. {'We eat some of them, one by one. ' * 100} So there are 5 left."
    assert [math(prompt(answer), response(text)).value for answer in ("5", "7")] == [1.0, 0.0]


GARBAGE = ["\\boxed{" * 20_000, "{" * 100_000, "1 " * 50_000, "$" * 50_000, "answer is " * 10_000, "\\frac{" * 2_000]


@pytest.mark.parametrize("text", [*GARBAGE, "\x00\ud83d"])
def test_math_is_quick_on_long_garbage(text):
    start = time.process_time()
    assert math(prompt("7"), response(text)).value == 0.0
    assert time.process_time() - start < 5  # seconds; unbounded, math-verify takes half a minute for some of these


@pytest.mark.parametrize("answer", ["7", r"\sin(a)"])
@pytest.mark.parametrize("text", [r"\boxed{\sin(123457a)}", r"\boxed{\tan(1234577 x)+\cos(99991 b)}"])
def test_math_expands_no_multiple_of_an_angle(answer, text):
    math(prompt("7"), response("7"))  # loads the library
    start = time.process_time()
    assert math(prompt(answer), response(text)).value == 0.0
    assert time.process_time() - start < 2  # seconds; expanded, such an angle takes many


@pytest.mark.parametrize("name", ["aime24", "amc", "math500", "deepscaler_aime_1983_2023"])
def test_math_on_real_answers(name):
    folder = os.environ.get("METRONOME_REAL_DATA")
    if not folder:
        pytest.skip("METRONOME_REAL_DATA is unset: the real problem sets are not part of the project")
    with open(os.path.join(folder, f"{name}.json")) as file:
        answers = [str(row["answer"]) for row in json.load(file)][:120]
    right = [math(prompt(answer), response(f"so it is $\\boxed{{ {answer} }}$.")).value for answer in answers]
    wrong = [math(prompt(answer), response(f"so it is $\\boxed{{ {answer} + 1 }}$.")).value for answer in answers]
    assert right == [1.0] * len(answers)
    assert sum(wrong) == 0
