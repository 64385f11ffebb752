import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, DeadlineError, ProcessDied, RewardError
from engine.orchestrator.workers import verifier_pool
from engine.types import Score
from engine.wire import verifier_messages
from engine.wire.columns import pack_response
from support.verifier_calls import ORCHESTRATOR, PROMPT, alive, response, until_dead, verifiers


@pytest.mark.parametrize("spec", ["exact", "math"])
async def test_a_built_in_one_scores_texts_and_decodes_packed_responses(spec, tiny_model):
    pool = verifiers(spec)
    try:
        await pool.start(Tokenizer(tiny_model).for_verifiers)
        assert pool.per_response
        [half] = await pool.score(PROMPT, [response("#\ud83d")])  # half a character crosses
        assert (half.value, half.detail[-1]) == (0.0, "\ud83d")
        texts = (r"\boxed{2}#2", "#3")
        packed = [pack_response(dataclasses.replace(response(), token_ids=tuple(text.encode()))) for text in texts]
        for responses in ([response(text) for text in texts], packed):
            assert [score.value for score in await pool.score(PROMPT, responses)] == [1.0, 0.0]
    finally:
        pool.close()


async def test_a_packed_response_is_decoded_in_the_process_also_in_one_that_replaces_another(reward, tiny_model):
    """And a reward sees of it what it would see of an opened one."""
    tokenizer = Tokenizer(tiny_model)
    spec = reward(
        """
        import os
        from engine.types import Prompt, Response
        def reward(prompt, responses):
            assert isinstance(prompt, Prompt) and all(isinstance(r, Response) for r in responses)
            if responses[0].text == "die":
                os._exit(3)
            return [float(repr((prompt, r)) == open(__file__ + ".expected").read()) for r in responses]
    """.replace("\n        ", "\n")
    )
    right = dataclasses.replace(
        response("#2é"), token_ids=(*"#2é".encode(), 256), logprobs=(-0.5,) * 5, loss_mask=(True,) * 5
    )
    Path(spec.split(":")[0] + ".expected").write_text(repr((PROMPT, right)))
    pool = verifiers(spec, on_error="zero")
    try:
        await pool.start(tokenizer.for_verifiers)
        packed = [pack_response(right), pack_response(dataclasses.replace(right, seed=1))]
        assert await pool.score(PROMPT, packed) == [Score(1.0), Score(0.0)]
        deadly = pack_response(dataclasses.replace(right, token_ids=tuple(b"die")))
        assert [score.status for score in await pool.score(PROMPT, [deadly])] == ["error"]
        assert await pool.score(PROMPT, [*packed[:1], right]) == [Score(1.0)] * 2
    finally:
        pool.close()


ASYNC = """import asyncio
from engine.reward import per_response
loops = set()
@per_response
async def reward(prompt, response):
    await asyncio.sleep(0)
    loops.add(asyncio.get_running_loop())
    return len(loops) * float(response.text == '#' + prompt.answer)
"""


async def test_async_rewards_of_one_response_each_share_one_loop(reward):
    async with verifiers(reward(ASYNC)) as pool:
        assert pool.per_response
        for _ in range(2):
            assert await pool.score(PROMPT, [response("#2"), response("#1")]) == [Score(1.0), Score(0.0)]


NOISY = """import os, sys, threading
print('loading')
def fails():
    raise ValueError('\\x1b[2Jsee http://user:hunter2@host')
def reward(prompt, responses):
    print('scoring ' * 5000)
    os.write(1, b'raw')
    sys.stdout.write('no newline')
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    return [1.0]
"""


async def test_what_a_reward_prints_is_in_the_log_and_what_its_threads_raise_is_cleaned_there(reward, tmp_path):
    async with verifiers(reward(NOISY), log=tmp_path / "verifier.log") as pool:
        assert await pool.score(PROMPT, [response()]) == [Score(1.0)]
    log = (tmp_path / "verifier.log").read_text()
    assert "loading" in log
    assert "scoring scoring" in log
    assert r"ValueError: \x1b[2Jsee http://host" in log
    assert "hunter2" not in log


HANGS = {
    "python": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "holds the interpreter lock": "import re; re.match('(a|a)*b', 'a' * 60)",
    "ignores SIGTERM": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n        while True: pass",
}


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS.keys())
async def test_hanging_call_scores_zero_and_the_next_one_works(reward, hang):
    spec = reward(
        f"def reward(prompt, responses):\n    if responses[0].text == 'hang':\n        {hang}\n"
        "    return [1.0] * len(responses)"
    )
    async with verifiers(spec, timeout_s=0.3) as pool:
        start = time.monotonic()
        scores = await pool.score(PROMPT, [response("hang"), response()])
        why = f'reward.function = "{spec}", prompt {PROMPT.id}: no score within 0.3 s'
        assert scores == [Score(0.0, "timeout", why)] * 2
        assert time.monotonic() - start < 5.0
        assert await pool.score(PROMPT, [response(), response()]) == [Score(1.0)] * 2


async def test_only_the_hanging_response_of_a_per_response_reward_is_lost():
    power = r"\boxed{9^{9^{9^{9}}}}"
    async with verifiers("math", timeout_s=1.0) as pool:
        scores = await pool.score(PROMPT, [response(r"\boxed{2}"), response(power), response(r"\boxed{2}")])
    assert [score.value for score in scores] == [1.0, 0.0, 1.0]
    assert scores[1].status in ("ok", "timeout")


async def test_a_hanging_call_does_not_hold_up_the_other_worker(reward):
    spec = reward(
        "import time\ndef reward(prompt, responses):\n"
        "    time.sleep(60 if responses[0].text == 'hang' else 0)\n    return [1.0]"
    )
    async with verifiers(spec, workers=2, timeout_s=2.0) as pool:
        hanging = asyncio.create_task(pool.score(PROMPT, [response("hang")]))
        for _ in range(20):
            assert await pool.score(PROMPT, [response()]) == [Score(1.0)]
        assert not hanging.done()
        assert (await hanging)[0].status == "timeout"


DIES = """import os, pathlib, signal
from engine.reward import per_response
@per_response
def reward(prompt, response):
    lives = pathlib.Path(__file__).with_name(response.text)
    left = int(lives.read_text()) if lives.exists() else 0
    if left:
        lives.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0, 0.5][lives.exists()]
"""


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_response_whose_worker_is_killed_is_scored_again(reward, tmp_path, workers):
    (tmp_path / "killed").write_text("2")
    async with verifiers(reward(DIES), workers=workers) as pool:
        scores = await pool.score(PROMPT, [response("other"), response("killed")])
    assert scores == [Score(1.0), Score(0.5)]


async def test_a_response_that_kills_its_worker_again_and_again_is_an_error_by_name(reward, tmp_path):
    (tmp_path / "killed").write_text("99")
    spec = reward(DIES)
    async with verifiers(spec) as pool:
        with pytest.raises(RewardError, match="3 processes died of it; last error: its process was ended by SIGKILL"):
            await pool.score(PROMPT, [response("killed")])
        assert (tmp_path / "killed").read_text() == "96"
        assert await pool.score(PROMPT, [response("other")]) == [Score(1.0)]
    async with verifiers(spec, on_error="zero") as pool:
        (score,) = await pool.score(PROMPT, [response("killed")])
        assert (score.value, score.status) == (0.0, "error")


def kill_worker():
    """End the verifier process of this test; it has ended when this returns."""
    [worker] = [one for one in psutil.Process().children() if "engine.verifier.worker" in one.cmdline()]
    worker.kill()
    until_dead(worker.pid)


async def test_an_idle_worker_that_is_killed_costs_no_score():
    async with verifiers("exact") as pool:
        kill_worker()
        assert await pool.score(PROMPT, [response()]) == [Score(1.0, detail="2")]


async def test_a_worker_that_is_killed_while_it_loads_is_started_again(reward, tmp_path):
    lives = tmp_path / "lives"
    lives.write_text("2")
    body = (
        f"import os, pathlib, signal\nlives = pathlib.Path({str(lives)!r})\nleft = int(lives.read_text())\n"
        "lives.write_text(str(left - 1))\nif left: os.kill(os.getpid(), signal.SIGKILL)\n"
        "def reward(prompt, responses): return [1.0]"
    )
    async with verifiers(reward(body)) as pool:
        assert await pool.score(PROMPT, [response()]) == [Score(1.0)]
    lives.write_text("99")
    with pytest.raises(BadInput, match="while loading it, its process was ended by SIGKILL"):
        await verifiers(reward(body)).start()


@pytest.mark.parametrize("choice", ["stop", "zero", "exclude"])
async def test_a_fault_of_a_built_in_reward_may_exclude_its_response_and_never_stops_a_run(monkeypatch, choice):
    monkeypatch.setattr("engine.orchestrator.workers.verifier_pool.DEATHS", 1)
    async with verifiers("math", on_error=choice) as pool:
        kill_worker()
        (score,) = await pool.score(PROMPT, [response(r"\boxed{2}")])
    assert (score.value, score.status, score.excluded) == (0.0, "error", choice == "exclude")
    assert "1 processes died of it; last error: its process was ended by SIGKILL" in score.detail


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("1 / 0", BadInput, r"user_reward\.py can't be loaded: ZeroDivisionError.*line 1"),
        ("import sys; sys.exit(7)", BadInput, "while loading it, its process exited with 7"),
        ("import time; time.sleep(60)", DeadlineError, "was not loaded within 5 s"),
    ],
)
async def test_loading_problems_surface_at_start_and_are_not_tried_again(
    reward, tmp_path, monkeypatch, body, error, said
):
    spec = reward(f"open({str(tmp_path / 'loads')!r}, 'a').write('x')\n".replace("\n", "; ") + body)
    if error is DeadlineError:
        monkeypatch.setattr(verifier_pool, "START_S", 5.0)
    with pytest.raises(error, match=said):
        await verifiers(spec).start()
    assert (tmp_path / "loads").read_text() == "x"


async def test_a_cancelled_call_does_not_answer_the_next_one(reward):
    spec = reward(
        "import time\ndef reward(prompt, responses):\n    seconds = float(responses[0].text)\n"
        "    time.sleep(seconds)\n    return [seconds]"
    )
    async with verifiers(spec) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score(PROMPT, [response("0.3")]), 0.1)
        assert await pool.score(PROMPT, [response("0")]) == [Score(0.0)]


async def test_close_ends_everything_at_once(reward, tmp_path):
    spec = reward(
        "import os, subprocess, pathlib\ndef reward(prompt, responses):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    note = pathlib.Path({str(tmp_path)!r}, f'pids-{{os.getpid()}}')\n"
        "    note.write_text(f'{os.getpid()} {child.pid}')\n"
        "    while len(responses) > 1: pass\n    return [1.0]"
    )
    pool = verifiers(spec, workers=2, on_error="zero")
    await pool.start()
    hanging = asyncio.create_task(pool.score(PROMPT, [response(), response()]))
    await pool.score(PROMPT, [response()])
    async with asyncio.timeout(20):
        while len(list(tmp_path.glob("pids-*"))) < 2:
            await asyncio.sleep(0.02)
    pool.close()
    for call in (hanging, pool.score(PROMPT, [response()])):
        with pytest.raises(ProcessDied, match="verifier . was closed"):
            await call
    pids = [int(pid) for file in tmp_path.glob("pids-*") for pid in file.read_text().split()]
    for pid in pids:
        until_dead(pid)
    assert len(pids) == 4
    assert "engine.verifier.worker" not in str([one.cmdline() for one in psutil.Process().children()])


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS.keys())
def test_workers_die_with_a_killed_orchestrator(reward, hang):
    spec = reward(
        "import os, subprocess\ndef reward(prompt, responses):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        f"    print(os.getpid(), child.pid)\n    if True:\n        {hang}\n    return [1.0]"
    )
    orchestrator = subprocess.Popen([sys.executable, "-c", ORCHESTRATOR, spec], stderr=subprocess.PIPE, text=True)
    pids: list[int] = []
    try:
        pids = [int(pid) for pid in orchestrator.stderr.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        os.kill(orchestrator.pid, signal.SIGKILL)
        for pid in pids:
            until_dead(pid)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        orchestrator.kill()
        orchestrator.wait(10)
        orchestrator.stderr.close()


SPEAKS = {  # what the third call of the reward does beside scoring
    "a child that returns": "os.fork()",
    "a child that returns while its parent waits for it": "pid = os.fork()\n        pid and os.waitpid(pid, 0)",
    "text on every descriptor": "for fd in range(3, 64):\n            with suppress(OSError): os.write(fd, b'hello')",
    "a frame's header": "for fd in range(3, 64):\n            with suppress(OSError): os.write(fd, bytes(3) + b'\\5')",
    "the answer of the call before": "for fd in range(3, 64):\n            with suppress(OSError): os.write(fd, OLD)",
}


@pytest.mark.parametrize("speaks", SPEAKS.values(), ids=SPEAKS.keys())
async def test_nobody_but_the_worker_answers_a_call_and_only_once(reward, tmp_path, speaks):
    """The score of each prompt is its answer, whatever the reward writes where, and whatever its children do."""
    old = verifier_messages.frame_message(verifier_messages.Scores.of([Score(9.0)] * 2, number=2))
    spec = reward(
        f"import os, pathlib\nfrom contextlib import suppress\nOLD = {old!r}\ndef reward(prompt, responses):\n"
        "    once = pathlib.Path(__file__).with_name('once')\n"
        "    if prompt.answer == '3' and not once.exists():\n        once.touch()\n"
        f"        {speaks}\n    return [float(prompt.answer)] * len(responses)"
    )
    async with verifiers(spec) as pool:
        prompts = [dataclasses.replace(PROMPT, answer=str(number)) for number in range(1, 7)]
        scores = [await pool.score(prompt, [response(), response()]) for prompt in prompts]
    assert scores == [[Score(float(prompt.answer))] * 2 for prompt in prompts]


async def test_a_reward_that_writes_to_its_socket_again_and_again_is_an_error_by_name(reward):
    spec = reward(
        "import os\ndef reward(prompt, responses):\n    for fd in range(3, 64):\n        try: os.write(fd, b'x')\n"
        "        except OSError: pass\n    return [1.0]"
    )
    async with verifiers(spec) as pool:
        with pytest.raises(
            RewardError, match="3 processes died of it; .*its process wrote something other than its answers"
        ):
            await pool.score(PROMPT, [response()])
