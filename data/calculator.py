"""The rollout program of infra/recipes/calculator.toml: a calculator that multiplies what the model writes."""

from __future__ import annotations

import re
from typing import Any


async def calculator(prompt: Any, chat: Any) -> None:  # noqa: ANN401
    """What the model writes up to "#" is its call; the product follows. The reward scores what stands behind "#"."""
    call = await chat.complete(stop="#")
    result = multiply(call.text)
    if result:
        chat.append(result)
        await chat.complete()


def multiply(call: str) -> str:
    """The product of the numbers whose digits begin each column, units first: "59041;14160;38011#" is 315 * 849.

    Empty if the call is not one.
    """
    columns = re.fullmatch(r"(?:(\d\d)\d*;)(?:(\d\d)\d*;)(?:(\d\d)\d*)#", call)
    if columns is None:
        return ""
    first, second = ("".join(pair[place] for pair in reversed(columns.groups())) for place in (0, 1))
    return str(int(first) * int(second))
