"""docs/examples/judge_reward.py against a judge on this machine that is busy, slow or wordy at times."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from engine.config import Reward
from engine.errors import RewardError
from engine.orchestrator.workers.verifier_pool import VerifierPool
from support.runs import ROOT
from support.verifier_calls import PROMPT, response

REWARD = Reward(
    function=f"{ROOT}/docs/examples/judge_reward.py:judge",
    timeout_s=60,
    environment=["JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY", "JUDGE_TRY_S"],
)


class Judge:
    """A server that grades 7, but does what `faults` says at the first requests: a status, seconds, or a text."""

    def __init__(self):
        self.faults = []
        self.asked = []
        self.keys = set()
        self.busy = 0
        self.most = 0

    async def answer(self, request):
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json()
        self.asked.append(body["messages"][0]["content"])
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            fault = self.faults.pop(0) if self.faults else 0.05
            if isinstance(fault, int):
                return web.Response(status=fault)
            await asyncio.sleep(fault if isinstance(fault, float) else 0)
            said = fault if isinstance(fault, str) else "Right. GRADE: 7"
            return web.json_response({"choices": [{"message": {"content": said}}]})
        finally:
            self.busy -= 1


@pytest.fixture
async def judge(monkeypatch):
    found = Judge()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    monkeypatch.setenv("JUDGE_TRY_S", "1")
    yield found
    await runner.cleanup()


async def test_a_judge_that_fails_at_times_still_grades_and_has_no_more_requests_at_a_time_than_the_limit(judge):
    async with VerifierPool(REWARD) as pool:
        scores = await pool.score(PROMPT, [replace(response(), text=str(number)) for number in range(20)])
        assert [score.value for score in scores] == [0.7] * 20
        assert 1 < judge.most <= 8
        judge.faults = [503, 429, 5.0]
        (score,) = await pool.score(PROMPT, [response("it is 2")])
        assert (score.value, score.metrics, score.detail) == (0.7, {"judge_tries": 4.0}, "Right. GRADE: 7")
        assert judge.keys == {"Bearer secret-key"}
        assert "Problem: 1+1=" in judge.asked[-1]
        assert "Answer to grade: it is 2" in judge.asked[-1]
        judge.faults = ["I can't say."] * 4
        (score,) = await pool.score(PROMPT, [response()])
        assert (score.status, score.excluded) == ("error", True)
        assert 'no grade in 4 tries: no grade in "I can\'t say."' in score.detail
        judge.faults = [401]  # a wrong key stops the run
        with pytest.raises(RewardError, match="raised ClientResponseError: 401"):
            await pool.score(PROMPT, [response()])
