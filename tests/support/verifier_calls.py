"""What tests of the verifier pool share: a prompt, a response, and whether a process lives."""

import time
from pathlib import Path

from engine.config import Reward
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.types import Prompt, Response

PROMPT = Prompt(
    id="0123456789abcdef",
    problem="1+1=",
    answer="2",
    token_ids=(5, 6, 7),
    columns={"level": 3, "big": 2**80, "nested": {"a": [None, 0.5]}},
    text="1+1=\n<think>é",
)


def verifiers(function, log=None, **reward):
    """The verifiers of a recipe with this reward function."""
    return VerifierPool(Reward(function=function, **reward), log)


def response(text: str = "#2", seed: int = 2**62) -> Response:
    return Response(
        token_ids=(8, 9),
        logprobs=(-0.5, -1.5),
        versions=((0, 4),),
        loss_mask=(True, False),
        finish_reason="length",
        text=text,
        seed=seed,
        instance="rollout-0",
    )


def alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits for its parent to look at it doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_dead(pid: int) -> None:
    """It would run for 1000 s if nobody ended it; on a busy machine an end takes more than the usual moment."""
    deadline = time.monotonic() + 10.0
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive after 10 s"
        time.sleep(0.02)


ORCHESTRATOR = """
import asyncio, sys
from engine.config import Reward
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.types import Prompt, Response
async def main():
    pool = VerifierPool(Reward(function=sys.argv[1], timeout_s=600))
    await pool.start()
    await pool.score(Prompt("", "", "", ()), [Response((), (), (), (), "stop", "", 0, "")])
asyncio.run(main())
"""
