"""Train on an environment of the library `verifiers` (0.4): `pip install verifiers` and the environment's package.

    [rollout]
    program = "docs/examples/verifiers_program.py:program"
    [reward]
    environment = ["VERIFIERS_ENV"]     # {"taskset": {"id": "gsm8k"}, "agent": {"runtime": {"type": "subprocess"}}}

`VERIFIERS_ENV=… python docs/examples/verifiers_program.py >problems.jsonl` writes the data. `data.prompt_template` is
how the environment's first request begins, for example "<|im_start|>".
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from contextlib import AsyncExitStack
from functools import cache

import verifiers.v1 as vf

from engine.types import Prompt, Score
from engine.verifier.program import Chat

ENVIRONMENT = vf.load_environment(vf.resolve_env_config(json.loads(os.environ["VERIFIERS_ENV"])))
TASKS = list(ENVIRONMENT.taskset)
SERVED = AsyncExitStack()
"""What the environment serves, until the process ends."""


@cache
def serving() -> asyncio.Task[None]:
    """Begin to serve, once in each process."""
    return asyncio.create_task(SERVED.enter_async_context(ENVIRONMENT.serving()))


async def program(prompt: Prompt, chat: Chat) -> Score:
    """Run one episode. Return the reward and the metrics of its agent."""
    await serving()
    variable = f"KEY_{secrets.token_hex(8)}"  # verifiers reads keys from variables
    async with chat.openai() as (base_url, key):
        os.environ[variable] = key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(model="policy", client=client)
            episode = await ENVIRONMENT.run_episode(TASKS[prompt.columns["task"]], context)
        finally:
            del os.environ[variable]
        trace = episode.traces[0]
        if errors := [*episode.errors, *trace.errors]:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Score(trace.reward, metrics=metrics)


if __name__ == "__main__":
    for number, task in enumerate(TASKS):
        print(json.dumps({"problem": str(task.data.prompt), "answer": "", "task": number}))
