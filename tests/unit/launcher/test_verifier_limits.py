"""What a reward may see and leave behind."""

import json
import os
import subprocess
import sys

import pytest

from engine.config import Reward
from engine.errors import RewardError
from engine.launcher.verifier_pool import VerifierPool
from engine.types import Score
from support.runs import wait_for
from support.verifier_calls import LAUNCHER, PROMPT, alive, response, until_dead

SECRETS = {
    "METRONOME_TOKEN": "a",
    "AWS_ACCESS_KEY_ID": "b",
    "AWS_SECRET_ACCESS_KEY": "c",
    "MLFLOW_TRACKING_PASSWORD": "d",
    "PREFECT_API_AUTH_STRING": "e",
    "JUDGE_KEY": "f",
}


async def test_a_reward_sees_no_secret_but_those_that_the_recipe_names(reward, monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    spec = reward(
        "import json, os\ndef reward(prompt, responses):\n"
        f"    open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))\n    return [1.0]"
    )
    async with VerifierPool.of(Reward(function=spec, environment=["JUDGE_KEY"])) as pool:
        await pool.score(PROMPT, [response()])
    seen = json.loads((tmp_path / "seen").read_text())
    assert SECRETS.keys() & seen.keys() == {"JUDGE_KEY"}
    assert seen["JUDGE_KEY"] == "f"
    assert seen["PATH"] == os.environ["PATH"]


ORPHAN = """
import os, subprocess, sys
def reward(prompt, responses):
    code = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    open({note!r}, "w").write(child.stdout.readline())
    {end}
    return [1.0]
"""
"""A reward that leaves a process behind in a session of its own, whose parent has ended."""


@pytest.mark.parametrize("end", ["pass", "os._exit(3)", "os.kill(os.getpid(), 9)", "__import__('time').sleep(60)"])
async def test_nothing_that_a_reward_has_started_survives_its_worker(reward, tmp_path, end):
    spec = reward(ORPHAN.format(note=str(tmp_path / "pid"), end=end))
    async with VerifierPool(spec, on_error="zero", timeout_s=20 if end == "pass" else 5) as pool:
        [score] = await pool.score(PROMPT, [response()])
        orphan = int((tmp_path / "pid").read_text())
        assert (score.status == "ok") == alive(orphan) == (end == "pass")
    until_dead(orphan)


def test_nothing_that_a_reward_has_started_survives_a_killed_launcher(reward, tmp_path):
    spec = reward(ORPHAN.format(note=str(tmp_path / "pid"), end="__import__('time').sleep(600)"))
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, spec])
    try:
        note = tmp_path / "pid"
        wait_for(lambda: note.exists() and note.read_text().strip(), "the orphan")
        assert alive(int(note.read_text()))
    finally:
        launcher.kill()
        launcher.wait(10)
    until_dead(int(note.read_text()))


async def test_a_reward_has_a_limit_of_memory(reward):
    spec = reward("def reward(prompt, responses):\n    return [float(len(bytearray(2**30)))]")
    async with VerifierPool.of(Reward(function=spec, memory_gb=0.5)) as pool:
        with pytest.raises(RewardError, match="raised MemoryError"):
            await pool.score(PROMPT, [response()])
    async with VerifierPool.of(Reward(function=spec)) as pool:
        assert await pool.score(PROMPT, [response()]) == [Score(2.0**30)]
