"""Play environments of OpenEnv, which are servers of their own: `pip install openenv`.

    [rollout]
    program = "docs/examples/openenv_program.py:program"
    [reward]
    environment = ["OPENENV_URL"]       # http://127.0.0.1:8000

A row of the data has the name of the action's text field in the column `action`: "message" for the echo environment. A
server plays as many episodes at once as its `max_concurrent_envs` says; the run has up to `rollout.concurrency` times
`rollout.group_size` on each instance.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from openenv.core import GenericEnvClient

from engine.errors import OutOfRoom
from engine.types import Prompt
from engine.verifier.program import Chat


async def program(prompt: Prompt, chat: Chat) -> float:
    """Play one episode, a line for each action. Return the sum of its rewards."""
    total = 0.0
    async with GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as environment:
        result = await environment.reset(seed=int(prompt.id[:8], 16))  # the same prompt is the same episode
        with suppress(OutOfRoom):
            while not result.done:
                chat.append(f"{json.dumps(result.observation)}\n")
                action = (await chat.complete(stop="\n", max_new_tokens=64)).text.strip()
                result = await environment.step({prompt.columns["action"]: action})
                total += float(result.reward or 0)
    return total
