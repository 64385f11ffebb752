"""Gold answers and whole responses without a box, that state them or another answer."""

_RIGHT = {
    "70000": ["He increased the value by 80,000*1.5=120,000\nSo he made a profit of 200,000-130,000=$70,000"],
    "20": ["In the afternoon, then, the final meal would require 60-15-25=20 cups of chicken feed."],
    "64": ["So in total Kylar needs to pay 24 + 40 = $64 for the glasses he wants to buy."],
    r"\$32,\!348": [r"The answer is $\$32,\!348$.", r"Thus $\$32,\!348$ is the answer."],
    "1234": ["### Final Answer\n\nThe company made **$1,234.00** in total."],
    "72": ["The answer is: Natalia sold 72 clips altogether in April and May."],
    "6": ["The answer is 5? No, it is 6.", "The answer is 5. Actually, it is 6.", "Final answer: 5\n\nCorrection: 6"]
    + [
        "The answer is 5\n\nWait, I made a mistake. It should be 6.",
        "There are 6 ways to do it.",
        "Answer: 6<|im_end|>",
    ]
    + [
        "So x = 6. This is the answer.",
        "The textbook says the answer is 5, but it's actually 6.",
        "x = 6 ✓",
        "We find that the answer is 6.",
    ],
    "12": [
        "<think>5+7=12</think>\n<answer>12</answer>",
        "<answer>x = 12</answer>",
        "<answer>$12$</answer>",
        "<answer>The result is 12.</answer>",
        "<answer>12 apples</answer>",
        "Thus 12 is the answer.",
        "Thus, 12 is our final answer!",
        "The answer is 12 (not 13).",
        "Answer: 12\n\nLet me know if you have 3 more questions.",
        "The final answer is 12.\nConfidence: 95%",
        "The answer is not 13. It is 12.",
        "### Answer\n\n12",
        "因此12为最终答案",
        "The answer is $12$ cm",
        "The answer cannot be 13, it is 12.",
        "<b>Answer:</b> 12",
        "The answer: 12, i.e., 24/2",
        "【答案】12",
        "<answer>\n\\[ x = 12 \\]\n</answer>",
        "解:设有x个,则 2x+3=27。\n\n答:小明一共有12个苹果。",
    ],
    "5": [
        "The answer is 5 because 2+3=5 and not 6.",
        "The answer is 5. I first got 4.",
        "答案：5",
        "答案是5",
        "5就是答案。",
    ],
    "18": ["The answer is 18, not 17.", "18, not 17, is the answer.", "18 and not 17 is the answer", "#### 18"]
    + ["So we have 9 eggs left, and she makes 9*2 = $18 every day.", "The answer is not 17 but 18."]
    + ["Answer: 18. (Checking: an answer of 17 fails.)", "A tempting but incorrect answer is 17. So we get 18."]
    + [
        "**Answer: 18**\n\nNote: had we forgotten it, the answer would be 17.",
        "My first answer was 17. That was wrong. It is 18.",
    ],
    "8": ["Answer: 8. Check: 8 - 5 = 3"],
    "10": ["So she has 4 + 6 = 10 apples left."],
    "7": ["Thus $7$ is the answer.", "So the answer, 7, is prime."],
    "0.5": ["The answer is 50%", "The probability is 1/2."],
    "B": [
        "The answer is (B).",
        "The answer is B.",
        "Answer: B) 12",
        r"\textbf{(B)}",
        "the correct answer is option (B)",
        "Option B is the correct one.",
        "B is correct.",
        "答案是A?不,应该是B。",
        "综上所述,选项A和选项D不对,本题应选B项,而不是C项。",
    ],
    "ACD": ["故选：ACD"],
    "C": ["故选：C", "故选 C。", "本题答案为C项", "选择 C", "C)", "C) 17", "I pick C"]
    + ["So the correct option is (C) 17.", "正确选项是C。", "因此选择C选项", "由于A、B两项都错误,因此正确答案为C。"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"The answer is \begin{pmatrix}1\\2\end{pmatrix}."],
    "(2,3)": ["The answer is (2, 3).", "The point is (2, 3)."],
    "2,3": ["The answers are 2 and 3.", "The solutions are 2 and 3.", "x=2, x=3"],
    "x=3 or x=-2": ["Therefore x = 3 or x = -2."],
    "-3": ["The answer is −3", "x = −3"],
    r"\sqrt{2}": ["The answer is √2.", "The answer is sqrt(2).", r"所以答案为 $\sqrt{2}$。"],
    r"\pi": ["The answer is pi.", "The answer is π"],
    "x^2": ["The answer is x^2."],
    "100": ["The answer is 1e2"],
    "[0,1)": ["The answer is [0, 1)."],
    "x=1,y=2": ["The answer is x = 1, y = 2.", "The answer is $x=1$ and $y=2$."],
    r"3\frac12": ["The answer is 3 1/2."],
    "5000000": ["The answer is 5 million."],
    "10:30": ["at 10:30 a.m."],
    r"\text{Monday}": ["The answer is **Monday**."],
    "1200": ["#### 1,200", "The total is $1,200.00", "He pays 1 200 dollars."],
    "73": ["Left: 437 + 468 = 905\nThus, the number is **73**.\n\n---\n\n✅ Final Answer: **73**"],
}
_CHANGED = (
    "7 over 8, 7 to the power 2, 7 divided by 2, 7 multiplied by 2, 7 to 9, 7 through 9, 7 out of 10, 7 choose 2"
    ", 7 tenths, 7 thousandths, 7 and a half, 7 point 5, 7 hundred, negative 7, the opposite of 7, the 7th prime"
    ", the reciprocal of 7, at least 7, more than 7, twice 7, the square of 7, 7 squared, neither 7 nor 8, exceeds 7"
    ", anything but 7, nearly 7"
)
"""Words around a 7 that make it another answer."""
_WRONG = {
    "17": ["The answer is 18, not 17.", "18, not 17, is the answer.", "Answer: 18. (Checking: an answer of 17 fails.)"]
    + ["A tempting but incorrect answer is 17. So we get 18.", "My first answer was 17. That was wrong. It is 18."],
    "7": [f"The answer is {words}." for words in _CHANGED.split(", ")]
    + ["The answer is 7 or 8, I am not sure.", "答案是7,这是错的。"]
    + [
        "Let's pretend the answer is 7.",
        "A common mistake is to say the answer is 7.",
        "The wrong answer is 7.",
        "答案至少是7。",
    ]
    + ["I first thought that the answer is 7, but then I found 8.", "The answer is 7 (or 8)."]
    + ["The answer is 7.\nHowever, this is wrong.", "The answer is 7. That can't be right."]
    + [
        "The answer is 7\n\nWait, I made a mistake. It should be 8.",
        "The answer is 7 (wrong!).",
        "There's no way the answer is 7.",
    ]
    + [
        "The student claims the answer is 7.",
        "The answer is 7 (mod 9).",
        "The answer is > 7.",
        "We reject x = 7.",
        "答案可能是7。",
    ],
    "4": ["The answer is 5. I first got 4.", "答案是3，不是4"],
    "3": ["Answer: 8. Check: 8 - 5 = 3", "The solutions are 2 and 3."],
    "12": [
        r"The answer is \boxed{12",
        "<think>the answer is \\boxed{12}</think> I am not sure.",
        "<think>maybe 12</think><answer>13</answer>",
        "The answer is 12 or more.",
        "The answer is at least 12.",
        "The answer is 12 or 13.",
        "The answer is 120.",
        "The answer is not 12.",
        "12 is not the answer.",
        "The answer cannot be 12, it is 13.",
        "The answer lies between 10 and 12.",
    ],
    "B": ["I think the answer is A or B", "The answer is (A), not (B)."],
    "5": [
        "The answer is 5 million.",
        "答案是5万",
        "I don't think the answer is 5.",
        "It is false that the answer is 5.",
    ]
    + ["If the answer is 5, then we have a contradiction.", "Is the answer 5? I do not know.", "It could be 5."]
    + [
        "Nobody would say the answer is 5.",
        "Some would say the answer is 5, but I disagree.",
        "The answer is 5? No, it is 6.",
    ]
    + ["The answer is 5. Actually, it is 6.", "Final answer: 5\n\nCorrection: 6", "The answer is 5 or maybe 6."]
    + ["I cannot answer. There are 5 unknowns.", "<answer>There are 3 red and 5 blue balls.</answer>"],
    "5\\text{ km}": ["The answer is 5 miles."],
    "70000": ["The profit is $70,000 per year, i.e. $5,833.33 a month."],
    "x=3 or x=-2": ["Therefore x = 3."],
    "9": ["The answer is 9\nThe answer is 10"],
}
STATED = [(gold, text) for gold, texts in _RIGHT.items() for text in texts]
NOT_STATED = [(gold, text) for gold, texts in _WRONG.items() for text in texts]
