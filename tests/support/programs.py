"""Rollout programs that tests run."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil

from engine.errors import OutOfRoom
from engine.types import Score


async def doubling(prompt, chat):
    """Two turns with the number of the first one's tokens between them: a function of its input."""
    first = await chat.complete(max_new_tokens=3)
    chat.append(f"[{len(first.token_ids)}]")
    second = await chat.complete(max_new_tokens=4)
    return Score(float(sum(second.token_ids) % 2), metrics={"calls": 1})


def _once(name):
    try:
        Path(os.environ["METRONOME_TEST_MARKS"], name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _strike():
    """In the first call an instance dies, in the second this process, and in the twentieth the orchestrator."""
    orchestrator = psutil.Process(os.getppid()).parent()
    if _once("instance"):
        instances = [child for child in orchestrator.children() if "engine.instance.embedded" in child.cmdline()]
        instances[0].kill()
    elif _once("worker"):
        os._exit(1)
    elif not any(map(_once, map(str, range(25)))) and _once("orchestrator"):  # after the first step's 24 responses
        orchestrator.send_signal(signal.SIGKILL)


async def struck(prompt, chat):
    """Two turns with a tool between them. Where METRONOME_TEST_POINT says, processes die: in the tool, between two
    turns, or in the second one."""
    point = os.environ.get("METRONOME_TEST_POINT")
    first = await chat.complete(max_new_tokens=3)
    if point == "tool":
        await asyncio.to_thread(_strike)
    chat.append(f"[{len(first.token_ids)}]")
    if point == "between turns":
        _strike()
    second = asyncio.create_task(chat.complete(max_new_tokens=12))
    if point == "turn":
        await asyncio.sleep(0.01)
        _strike()
    return await second


async def scored(prompt, chat):
    """`struck` with a score of its own."""
    second = await struck(prompt, chat)
    return Score(float(sum(second.token_ids) % 2), metrics={"calls": 1})


async def unscored(prompt, chat):
    """`struck`, which leaves the score to the reward function."""
    await struck(prompt, chat)


async def clock(prompt, chat):
    """A tool that tells the time, which no second call tells again."""
    await chat.complete(max_new_tokens=3)
    chat.append(f"[{time.time_ns() % 10**6}]")
    second = await chat.complete(max_new_tokens=4)
    return Score(float(sum(second.token_ids) % 2))


async def one_turn(prompt, chat):
    """What happens without a program."""
    await chat.complete()


async def with_tool(prompt, chat):
    """A turn, what a tool answers, in the model's chat template, and another turn."""
    await chat.complete()
    chat.messages([{"role": "tool", "content": "4"}], tools=[{"name": "calculator"}])
    await chat.complete()
    return 1.0


async def endless(prompt, chat):
    """Ends where no room is left."""
    while True:
        await chat.complete(max_new_tokens=2)
        chat.append([7])


async def greedy(prompt, chat):
    """Asks for more than is left."""
    await chat.complete(max_new_tokens=2)
    await chat.complete(stop="x", max_new_tokens=10**6)


async def prefilled(prompt, chat):
    """`doubling` after a token that begins the answer."""
    chat.append([7])
    return await doubling(prompt, chat)


async def partly_scored(prompt, chat):
    """Leaves the score of every response with an even number of tokens to the reward function."""
    turn = await chat.complete()
    return 0.25 if len(turn.token_ids) % 2 else None


async def misbehaves(prompt, chat):
    """As its prompt says."""
    turn = await chat.complete(max_new_tokens=2)
    match prompt.problem:
        case "raise":
            raise ValueError("no such tool")
        case "sleep":
            await asyncio.sleep(1000)
        case "hang":
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "die once" if _once("died"):
            os._exit(3)
        case "nonsense":
            return "much"
        case "wrong token":
            chat.append([10**6])
            await chat.complete()
        case "caught":
            try:
                for _ in range(9):
                    await chat.complete(max_new_tokens=2)
            except OutOfRoom:
                return 0.5
    return float(len(turn.token_ids))


async def counted(prompt, chat):
    """Two turns. Counts how often it was called and which turns it got."""
    with Path(os.environ["METRONOME_TEST_MARKS"], prompt.id).open("a") as marks:
        marks.write("begun ")
        await chat.complete(max_new_tokens=1)
        marks.write("between ")
        marks.flush()
        chat.append([7])
        await chat.complete()
    return 1.0
