"""The program of smollm2_tool.toml: a calculator that the model calls in its chat format."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from engine.types import Score

if TYPE_CHECKING:
    from engine.types import Prompt
    from engine.verifier.program import Chat

PARTS = ("<tool_call>", '"name"', '"calculator"', '"arguments"', '"expression"', "}}</tool_call>")
"""A call's parts in their order."""
CALL = re.compile(r"<tool_call>(\{.*\})</tool_call>", re.DOTALL)
SUM = re.compile(r"(\d{1,9}) *([-+]) *(\d{1,9})")


async def tool(prompt: Prompt, chat: Chat) -> Score:
    """The first turn calls the calculator, whose answer is a message of the role "tool". The second one says it.

    Of the score, 0.3 is for the parts of a call, 0.5 for a valid call, 0.7 for one whose result is the answer, and 1
    for saying the answer then. `metrics` has the rates of valid and of right calls.
    """
    text = (await chat.complete(max_new_tokens=40)).text.strip()
    result = calculate(text)
    metrics = {"valid_calls": float(result is not None), "right_calls": float(result == prompt.answer)}
    if result is None:
        return Score(0.3 * count_parts(text) / len(PARTS), metrics=metrics)
    chat.append({"role": "tool", "content": result})
    said = re.findall(r"-?\d+", (await chat.complete(max_new_tokens=16)).text)
    if result != prompt.answer:
        return Score(0.5, metrics=metrics)
    return Score(1.0 if said[-1:] == [result] else 0.7, metrics=metrics)


def calculate(text: str) -> str | None:
    """The calculator's answer to a turn; None unless the turn is one valid call and nothing else."""
    found = CALL.fullmatch(text)
    try:
        called = json.loads(found[1]) if found else None
    except ValueError:
        return None
    match called:
        case {"name": "calculator", "arguments": {"expression": str(expression)}}:
            numbers = SUM.fullmatch(expression.strip())
            if numbers:
                first, sign, second = numbers.groups()
                return str(int(first) + int(sign + second))
    return None


def count_parts(text: str) -> int:
    """How many of PARTS the text has, in their order and without a gap among them."""
    place = 0
    for number, part in enumerate(PARTS):
        found = text.find(part, place)
        if found < 0:
            return number
        place = found + len(part)
    return len(PARTS)
