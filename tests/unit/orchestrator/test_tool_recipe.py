"""The program of infra/recipes/smollm2_tool.toml."""

import pytest

from engine.types import Prompt
from engine.verifier.program import Turn, load_program
from support.runs import ROOT

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "8 + 9"}}</tool_call>'


class Conversation:
    """Turns that were written before, and what is said between them."""

    def __init__(self, turns):
        self.turns = list(turns)
        self.said = []

    async def complete(self, **_limits):
        return Turn(self.turns.pop(0), (1,), "stop")

    def append(self, message):
        self.said.append(message)


@pytest.mark.parametrize(
    ("turns", "score", "result"),
    [
        (["It is 17."], 0.0, None),
        (['<tool_call>{"name": "add"'], 0.1, None),
        ([f"{CALL} then"], 0.3, None),  # all parts, but more than a call
        ([CALL.replace("8 + 9", "8 ** 9")], 0.3, None),
        ([CALL.replace("+", "-"), "17"], 0.5, "-1"),
        ([CALL, "It is 71."], 0.7, "17"),
        ([f"{CALL}\n", "Olga has 17 books."], 1.0, "17"),
    ],
)
async def test_each_part_of_a_call_is_worth_more(turns, score, result):
    program = load_program(f"{ROOT}/infra/recipes/smollm2_tool.py:tool")
    chat = Conversation(turns)
    found = await program.call(Prompt("p", "8 books and 9 more", "17", (1,)), chat)
    assert found.value == pytest.approx(score)
    assert chat.said == ([{"role": "tool", "content": result}] if result else [])
    assert found.metrics == {"valid_calls": float(result is not None), "right_calls": float(result == "17")}
