"""Which answer a response states."""

import time

import pytest

from engine.reward.extraction import boxed_answer, stated_answers
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
        ("<answer>12 apples</answer>", "12 apples"),
        ("<answer> She makes $18 every day at the farmers' market. </answer>", r"\$18"),
        ("<answer>There are 3 red and 5 blue balls.</answer>", "3 red and 5 blue balls"),
        ("<answer>12", "12"),
        ("<answer>12</answer> no, <answer>13</answer>", "13"),
        ("The answer is 12. <answer>13</answer>", "13"),
        ("<answer></answer>", ""),
    ],
    "statements": [
        ("So the answer, 7, is prime.", "7"),
        ("18 and not 17 is the answer.", "18"),
        ("Thus the answer is not 17, as one might expect, but rather 18.", "18"),
        ("The answer is 12. Let me double-check that the answer is correct.", "12"),
        ("The answer is 9.\nThe answer is 10.", "10"),
        ("The answer to question 7 is 3.", "3"),
        ("The answer is (B).", "(B)"),
        ("The correct answer is **(B) hyperbola**.", "(B)"),
        ("The answer is (A) or (B).", "(A) or (B)"),
        ("The answer is 17 (seventeen).", "17"),
        ("The answer is 5. Sorry, I meant 6.", "6"),
        ("答案是5。更正:6。", "6"),
        ("The answer is [0, 1).", "[0, 1)"),
        ("The answer is {1, 2}.", "{1, 2}"),
        ("The answers are $1$ and $2$. Note that $7$ is none.", "1 and 2"),
        ("The answer is x = 1, y = 2.", "x = 1, y = 2"),
        ("The answer is 12 apples.", "12 apples"),
        ("The answer is 12 or more.", "12 or more"),
        ("The answer is at least 12.", "at least 12"),
        ("The answer is 7 over 8, as we saw.", "7 over 8"),
        ("The answer is 7, 8 or 9, I am not sure which.", "7, 8 or 9"),
        ("The answer is **Monday**.", "Monday"),
        ("So Evelyn is the answer.", "Evelyn"),
        ("The answer is $50 for both.", r"\$50"),
        ("The answer is that she made $18 every day.", r"\$18"),
        ("She makes 9 * 2 = $<<9*2=18>>18.\n#### 18", "18"),
    ],
    "Chinese": [
        ("所以答案为 $\\sqrt{3}$。", "\\sqrt{3}"),
        ("解得 x=3，故答案为：3", "3"),
        ("答案是3，不是4", "3"),
        ("答案不是3，而是4", "4"),
    ],
    "last expressions": [
        ("She pays $18 and gets $2 back.", r"\$2"),
        ("Eva has 4 + 9 = 13 pens now.", "13 pens"),
        ("Tom can have 4 – 2 = 2 more pens left.", "2"),
        ("So she earns $400 + $60 = $460.", r"\$460"),
        ("They have **260 sheep** together.", "260"),
        ("It takes him 64 hours (that's 2 days and 16 hours) to finish.", "64 hours"),
        ("It took 30 minutes at most.", "30 minutes at most"),
        ("It is 7 eighths of a pie.", "7 eighths of a pie"),
        ("We see $x=4$. So there are 12 of them.", "12"),
        ("So there are 12: $x=4$", "x=4"),
        ("We get\n\\[\nx = 10.\n\\]\nas it was to be shown.", "x = 10"),
        ("Tom has 4n books, which resulted in 4 times", "4 times"),
        ("#### Step 4: done, so 7", "7"),
        ("There are 7 of them. Do you want 3 more?", "7"),
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
        "<think>3+4=7, so one root is fine. If x = -4, then",
        "<think>the answer is 12",
        "I'm sorry, but I cannot solve this: the text gives 0 details.",
        "I cannot answer. There are 5 unknowns.",
        "It cannot be 7.",
        "There are at least 7.",
        "What is the answer?",
        r"x = 17. The answer is \boxed{18",
    ],
)
def test_a_response_that_states_no_answer(text):
    assert stated_answers(text) == []


def test_all_candidates_stand_in_the_documented_order():
    assert stated_answers("The answer is 3. <answer>2</answer> \\boxed{1} and so 5 of them.") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} }", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x = 1 \right.} }", r"\left\{ x = 1 \right."),
        (r"\boxed{x \in [0, 1\}} }", r"x \in [0, 1\}"),
        (r"{ \boxed {1}", "1"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed 1", None),
        (r"$x=\boxed{1}$ and $y = \boxed{2}$", "x=1 and y = 2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, or 3"),
        (r"\boxed{1}, \boxed{1}", "1"),
        (r"\boxed{1}. \boxed{2}", "2"),
        (r"\boxed{1} is wrong, but not \boxed{2}", "2"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("", None),
    ],
)
def test_the_last_box_or_the_list_of_boxes_that_ends_there(text, answer):
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
