"""The program of calculator.toml: a calculator that shows the last three digits of a product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.types import Score

if TYPE_CHECKING:
    from engine.types import Prompt
    from engine.verifier.program import Chat

DIGITS = 3


async def calculator(prompt: Prompt, chat: Chat) -> Score:
    """Three turns press two keys each: the next digit of either factor, from the units on. The calculator then shows
    the next digit of the product. The fourth turn is the answer.

    It shows the digit in a column as the quickstart's model writes them: for 237x682= the response is 72 040; 38 030;
    26 060# 634, where the model writes 72, 38, 26 and 634.
    """
    first = second = ""
    while len(first) < DIGITS:
        keys = (await chat.complete(max_new_tokens=2)).text
        if not (len(keys) == 2 and keys.isascii() and keys.isdecimal()):
            return Score(0.0)
        first = keys[0] + first
        second = keys[1] + second
        shown = f"{int(first) * int(second):0{DIGITS}}"
        chat.append(f"0{shown[-len(first)]}0{';' if len(first) < DIGITS else '#'}")
    answer = (await chat.complete(max_new_tokens=DIGITS + 1)).text
    return Score(float(answer == prompt.answer))
