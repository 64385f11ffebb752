"""A reward that asks a judge: any server with OpenAI's chat API.

    [reward]
    function = "docs/examples/judge_reward.py:judge"
    timeout_s = 120             # more than TRIES tries and their pauses take
    on_timeout = "exclude"
    environment = ["JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY"]

A try that takes too long, a refused connection, a busy server and an answer without a grade are tried again. A response
whose grade stays unknown is left out of the training. A wrong key or address raises and stops the run.
"""

from __future__ import annotations

import asyncio
import os
import random
import re

import aiohttp

from engine.types import Prompt, Response, Score

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
KEY = os.environ.get("JUDGE_KEY", "")
TRY_S = float(os.environ.get("JUDGE_TRY_S", "20"))
TRIES = 4
PAUSE_S = 0.5
"""Longest pause before the second try; each further pause is twice as long."""
CONCURRENT = 8
"""Requests at a time. Each of the `reward.workers` processes has so many."""
BUSY = (408, 429, 500, 502, 503, 504)
GRADE = re.compile(r"GRADE:\s*(10|\d)\b")
QUESTION = """Grade the answer to a problem from 0 (wrong) to 10 (right and clear). Give a reason in one sentence, \
then write GRADE: and the number.

Problem: {problem}
Right answer: {answer}
Answer to grade: {response}"""


async def judge(prompt: Prompt, responses: list[Response]) -> list[Score]:
    """Return a tenth of the judge's grade for each response, between 0 and 1."""
    limit = asyncio.Semaphore(CONCURRENT)
    headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
    timeout = aiohttp.ClientTimeout(total=TRY_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        return await asyncio.gather(*(_score(session, limit, prompt, response) for response in responses))


async def _score(session: aiohttp.ClientSession, limit: asyncio.Semaphore, prompt: Prompt, response: Response) -> Score:
    content = QUESTION.format(problem=prompt.problem, answer=prompt.answer, response=response.text)
    body = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    why = ""
    for number in range(TRIES):
        if number:
            await asyncio.sleep(random.uniform(0.5, 1) * PAUSE_S * 2 ** (number - 1))
        try:
            async with limit:
                said = await _ask(session, body)
        except (aiohttp.ClientConnectionError, _JudgeBusy, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
            continue
        if found := GRADE.findall(said):
            return Score(int(found[-1]) / 10, detail=said[:200], metrics={"judge_tries": number + 1})
        why = f"no grade in {said[:80]!r}"
    return Score(0.0, status="error", detail=f"the judge gave no grade in {TRIES} tries: {why}", excluded=True)


class _JudgeBusy(Exception):
    """The judge's server may answer another time."""


async def _ask(session: aiohttp.ClientSession, body: dict[str, object]) -> str:
    async with session.post(f"{URL}/chat/completions", json=body) as answer:
        if answer.status in BUSY:
            raise _JudgeBusy(f"status {answer.status}")
        answer.raise_for_status()
        return str((await answer.json())["choices"][0]["message"]["content"])
