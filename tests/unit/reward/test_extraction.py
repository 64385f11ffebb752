"""Which answer a response states."""

import time

import pytest

from engine.reward.extraction import boxed_answer, last_boxed, stated_answers
from support.hostile_strings import hostile

STATED = {
    "boxes": [
        (r"\boxed{12} or <answer>13</answer>", "12"),
        (r"\boxed{12}, that is, the answer is 13", "12"),
        (r"First \boxed{13}, but the answer is \boxed{12}.", "12"),
        (r"\boxed{}", ""),
        (r"\fbox{5}", "5"),
        (r"<think>the answer is \boxed{12}</think> It is 13.", "13"),
        (r"<think>the answer is \boxed{12}", "12"),
        (r"<think>\boxed{12}</think>", "12"),
    ],
    "tags": [
        ("<think>5+7=12</think>\n<answer>12</answer>", "12"),
        ("<answer>\n12\n</answer>", "12"),
        ("<answer>x = 12</answer>", "x = 12"),
        ("<answer>The result is 12.</answer>", "12"),
        ("<answer>$12$</answer>", "12"),
        ("<answer>12 apples</answer>", "12"),
        ("<answer>12", "12"),
        ("<answer>12</answer> no, <answer>13</answer>", "13"),
        ("The answer is 12. <answer>13</answer>", "13"),
        ("<answer></answer>", ""),
    ],
    "statements": [
        ("Thus 12 is the answer.", "12"),
        ("Thus, 12 is our final answer!", "12"),
        ("Thus $7$ is the answer.", "7"),
        ("So the answer, 7, is prime.", "7"),
        ("The answer is 12 (not 13).", "12"),
        ("The answer is 18, not 17.", "18"),
        ("18, not 17, is the answer.", "18"),
        ("18 and not 17 is the answer.", "18"),
        ("Not 17 but 18 is the answer.", "18"),
        ("The answer is not 13. It is 12.", "12"),
        ("The answer is 5. I first got 4.", "5"),
        ("Answer: 8. Check: 8 - 5 = 3", "8"),
        ("The answer is 5 because 2+3=5 and not 6.", "5"),
        ("Answer: 12\n\nLet me know if you have 3 more questions.", "12"),
        ("The final answer is 12.\nConfidence: 95%", "12"),
        ("The answer is 12. Let me double-check that the answer is correct.", "12"),
        ("The answer is 9.\nThe answer is 10.", "10"),
        ("The answer to question 7 is 3.", "3"),
        ("# Answer\n\n12", "12"),
        ("✅ Final Answer: **73**", "73"),
        ("The answer is 50%", "50%"),
        ("The answer is (B).", "(B)"),
        ("Answer: B) 12", "B"),
        ("the correct answer is option (A)", "(A)"),
        ("The answer is (2, 3).", "(2, 3)"),
        ("The answer is [0, 1).", "[0, 1)"),
        ("The answer is {1, 2}.", "{1, 2}"),
        ("The answers are 1 and 2.", "1 and 2"),
        ("The answers are $1$ and $2$. Note that $7$ is none.", "1 and 2"),
        ("The answer is −3", "−3"),
        ("The answer is √2.", "√2"),
        ("The answer is x = 1, y = 2.", "x = 1, y = 2"),
        ("The answer is 3 1/2.", "3 1/2"),
        ("The answer is 5 million.", "5 million"),
        ("The answer is 5 miles.", "5 miles"),
        ("The answer is 12 apples.", "12"),
        ("The answer is 12 or more.", "12 or more"),
        ("The answer is at least 12.", "at least 12"),
        ("The answer is A or B", "A or B"),
        ("The answer is **Monday**.", "Monday"),
        ("So Evelyn is the answer.", "Evelyn"),
        ("The answer is $50 for both.", r"\$50"),
        ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
        ("The answer for one day is 9.\n#### 18", "18"),
        ("#### 1,200", "1,200"),
    ],
    "Chinese": [
        ("答案：5", "5"),
        ("答案是 5。", "5"),
        ("所以答案为 $\\sqrt{3}$。", "\\sqrt{3}"),
        ("故选：C", "C"),
        ("故选 ACD。", "ACD"),
        ("解得 x=3，故答案为：3", "3"),
        ("5就是答案。", "5"),
        ("因此12为最终答案", "12"),
        ("答案是3，不是4", "3"),
    ],
    "last expressions": [
        ("She has 4 + 6 = 10 apples left.", "10"),
        ("She pays $18 and gets $2 back.", "2"),
        ("The total is $1,200.00", r"\$1,200.00"),
        ("We see $x=4$. So there are 12 of them.", "12"),
        ("So there are 12: $x=4$", "x=4"),
        ("x = −3", "x = −3"),
        ("The point is (2, 3).", "(2, 3)"),
        ("The solutions are 2 and 3.", "2 and 3"),
        ("Therefore x = 3 or x = -2.", "x = 3 or x = -2"),
        ("Tom has 4n books, which resulted in 4 times", "4"),
        ("#### Step 4: done, so 7", "7"),
        ("at 10:30 a.m.", "10:30 a.m."),
    ],
}


@pytest.mark.parametrize(("text", "answer"), [pair for pairs in STATED.values() for pair in pairs])
def test_a_response_states_one_answer(text, answer):
    assert stated_answers(text)[0] == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I don't know.",
        "\\boxed{",
        "<think>12</think> I am not sure.",
        "What is the answer?",
        r"x = 17. The answer is \boxed{18",
    ],
)
def test_a_response_that_states_no_answer(text):
    assert stated_answers(text) == []


def test_all_candidates_stand_in_the_documented_order():
    text = r"#### 4" + "\nThe answer is 3. <answer>2</answer> \\boxed{1} and so 5 of them."
    assert stated_answers(text) == ["1", "2", "3", "5"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x = 1 \right.} }", r"\left\{ x = 1 \right."),
        (r"\boxed{x \in [0, 1\}} }", r"x \in [0, 1\}"),
        (r"{ \boxed {1}", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed 1", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"$x=\boxed{1}$ and $y = \boxed{2}$", "x=1 and y =2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1 , 2 or 3"),
        (r"\boxed{1}, \boxed{1}", "1"),
        (r"\boxed{1}. \boxed{2}", "2"),
        (r"\boxed{1} is wrong, but not \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("", None),
    ],
)
def test_boxes_with_only_a_separator_between_them_are_one_list(text, answer):
    assert boxed_answer(text) == answer


LONG = [
    *(
        "\\boxed{",
        "{",
        "1 ",
        "$",
        "answer is ",
        "\\frac{",
        "answer: 1+",
        "is the answer ",
        "{1",
        "<answer>",
        "(1,",
        "####\n",
    ),
    *("答案", "**", "*a", "\\text{", "$1", "a ", " ", "answer\n", "1,234", "the value of ", "\\[", "1"),
]


@pytest.mark.parametrize("text", [*(part * (60_000 // len(part)) for part in LONG), *hostile(64, seed=3)])
def test_reading_takes_linear_time(text):
    started = time.process_time()
    stated_answers(text)
    assert time.process_time() - started < 4
