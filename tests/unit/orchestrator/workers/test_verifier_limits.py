"""What a reward may see and leave behind."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

from engine.errors import RewardError
from engine.orchestrator.workers import verifier_pool
from engine.types import Score
from engine.verifier.worker import MEMORY
from support.scripted import until
from support.verifier_calls import PROMPT, alive, response, until_dead, verifiers

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
    async with verifiers(spec, environment=["JUDGE_KEY"]) as pool:
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
    async with verifiers(spec, on_error="zero", timeout_s=20 if end == "pass" else 5) as pool:
        [score] = await pool.score(PROMPT, [response()])
        orphan = int((tmp_path / "pid").read_text())
        assert (score.status == "ok") == alive(orphan) == (end == "pass")
    until_dead(orphan)


async def test_a_reward_has_a_limit_of_memory(reward):
    spec = reward("def reward(prompt, responses):\n    return [len(bytearray(2**30)) / 2**20]")
    async with verifiers(spec, memory_gb=0.5) as pool:
        with pytest.raises(RewardError, match="raised MemoryError"):
            await pool.score(PROMPT, [response()])
    async with verifiers(spec) as pool:
        assert await pool.score(PROMPT, [response()]) == [Score(1024.0)]


@pytest.mark.parametrize(
    ("built_in", "memory", "limit", "kind"),
    [(True, 0, MEMORY + 2**20, "AS"), (False, 2**30, 2**30 + 2**10, "DATA")],
)
def test_what_the_tokenizer_takes_is_not_the_rewards(built_in, memory, limit, kind):
    own = MEMORY if kind == "AS" else memory
    for took, expected in (("2**20, 2**10", limit), ("5, 7).since(MemoryUse(9, 9)", own)):  # what shrank is nothing
        code = (
            "import resource; from engine.verifier.worker import MemoryUse, limit_memory\n"
            f"limit_memory({built_in}, {memory}, MemoryUse({took}))\n"
            f"print(*resource.getrlimit(resource.RLIMIT_{kind}))"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert ran.stdout.split() == [str(expected)] * 2


BOMB = """
import os, time
def bomb(depth):
    for _ in range({each}):
        if not os.fork():
            os.setsid()
            open(os.path.join({notes!r}, str(os.getpid())), "w").close()
            if depth:
                bomb(depth - 1)
            time.sleep(1000)
            os._exit(0)
def reward(prompt, responses):
    bomb({depth})
    time.sleep({then})
    return [1.0]
"""
"""A reward that starts `each` processes, each of which starts as many, and so on `depth` times."""


@pytest.mark.parametrize(("each", "depth", "count"), [(2, 6, 254), (60, 0, 60)])
async def test_a_reward_with_too_many_processes_ends_with_all_of_them_by_name(
    reward, tmp_path, monkeypatch, each, depth, count
):
    monkeypatch.setattr(verifier_pool, "MOST_PROCESSES", 40)
    notes = tmp_path / "notes"
    notes.mkdir()
    spec = reward(BOMB.format(each=each, depth=depth, notes=str(notes), then=30))
    async with verifiers(spec, timeout_s=20) as pool:
        with pytest.raises(RewardError, match=r"its process was ended with all .*more than 40 at once$"):
            await pool.score(PROMPT, [response()])
        started = [int(note.name) for note in notes.iterdir()]
        assert 0 < len(started) <= count  # once: it is not scored again. Some ended before their note
        for process in started:
            until_dead(process)


@pytest.mark.parametrize(("most", "status"), [(30, "ok"), (29, "error")])
async def test_a_reward_may_start_as_many_processes_as_the_limit_says(reward, tmp_path, monkeypatch, most, status):
    monkeypatch.setattr(verifier_pool, "MOST_PROCESSES", most)
    async with verifiers(reward(BOMB.format(each=2, depth=3, notes=str(tmp_path), then=2)), on_error="zero") as pool:
        [score] = await pool.score(PROMPT, [response()])
    assert score.status == status


async def test_a_pause_of_the_orchestrator_does_not_count_as_time_of_the_reward(reward, tmp_path):
    """Of a machine that was suspended, or an orchestrator that was stopped: what scored 0 would be trained. The reward
    is not done when the orchestrator goes on."""
    note = tmp_path / "begun"
    spec = reward(
        "import time\ndef reward(prompt, responses):\n"
        f"    open({str(note)!r}, 'w').close()\n    time.sleep(3.5)\n    return [1.0]"
    )
    async with verifiers(spec, timeout_s=2.5) as pool:
        scoring = asyncio.create_task(pool.score(PROMPT, [response()]))
        await until(note.exists, "the reward to begin")
        time.sleep(3.0)  # the whole process
        [score] = await scoring
    assert score == Score(1.0, "ok")


SMALL = """
import resource, sys
from engine.verifier import worker
from engine.verifier.reward_function import check_built_in, load_reward
reward = load_reward("math")
worker.limit_memory(True, 0, worker.MemoryUse({space}, 0) if {space} else worker.MemoryUse.now())
check_built_in([reward])
"""


@pytest.mark.parametrize("space", [0, 1])
def test_a_verifier_that_has_no_memory_left_is_refused_and_does_not_score_0(space):
    """Libraries reserve address space for each CPU core: a limit that counts it leaves none on a large machine, and
    math-verify then takes every answer for wrong, without an error."""
    reserved = "import mmap; many = [mmap.mmap(-1, 64 * 2**20) for _ in range(24)]\n"  # 1.5 GiB, as 24 threads do
    code = reserved + SMALL.format(space=space)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if space:  # the limit counts what was reserved before
        assert 'BadInput: the verifier "math" scores' in ran.stderr
        assert ran.returncode != 0
    else:
        assert ran.returncode == 0, ran.stderr
