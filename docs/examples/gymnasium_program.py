"""Play environments of Gymnasium with actions that are numbers: `pip install gymnasium`.

    [rollout]
    program = "docs/examples/gymnasium_program.py:program"

A row of the data has the environment's name in the column `environment`, and its arguments in `arguments`. The prompt
explains the game and its actions.
"""

from __future__ import annotations

from contextlib import closing, suppress

import gymnasium

from engine.errors import OutOfRoom
from engine.types import Prompt
from engine.verifier.program import Chat


async def program(prompt: Prompt, chat: Chat) -> float:
    """Play one episode, a line for each action. Return the sum of its rewards."""
    made = gymnasium.make(prompt.columns["environment"], **prompt.columns.get("arguments", {}))
    total = 0.0
    with closing(made) as environment, suppress(OutOfRoom):
        seen, _ = environment.reset(seed=int(prompt.id[:8], 16))  # the same prompt is the same game
        over = False
        while not over:
            chat.append(f"{seen}\n")
            action = (await chat.complete(stop="\n", max_new_tokens=8)).text.strip()
            if action.isdecimal() and int(action) in environment.action_space:
                seen, reward, ended, cut, _ = environment.step(int(action))
                total += float(reward)
                over = ended or cut
    return total
