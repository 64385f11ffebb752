import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from engine.config.recipe import load_config
from engine.run.commands import AGENT as AGENT_MODULE
from engine.run.commands import SCORER_RANK, TRAINER_RANK, trainer_environment
from engine.run.watchdogs import WATCHDOGS
from engine.trainer.ranks.agent import KILL_S, _first_failure
from support.runs import ROOT, wait_for


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ({0: (1, 100), 1: (-9, 101)}, 1),  # rank 0 lost its connection
        ({0: (-15, 100), 1: (-9, 101)}, 1),  # and the agent ended it before it was through with its error
        ({0: (1, 101), 1: (1, 100)}, 1),
        ({0: (-15, 100), 1: (-15, 101)}, 0),
    ],
)
def test_the_rank_that_a_signal_ended_is_named_and_not_one_that_the_agent_ended(failures, first):
    found = {rank: SimpleNamespace(exitcode=code, timestamp=when) for rank, (code, when) in failures.items()}
    assert _first_failure(SimpleNamespace(failures=found))[0] == first


RANK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], os.environ["LOCAL_RANK"]).touch()
time.sleep(600)
"""
AGENT = """
import sys
from engine.trainer.ranks import agent

def of_deaf_ranks(config, entrypoint):
    return lambda *arguments: started(config, entrypoint)("-c", *sys.argv[1:])

started, agent.elastic_launch = agent.elastic_launch, of_deaf_ranks
sys.exit(agent.run_ranks(ranks=2, arguments=[], nodes=1, rendezvous="127.0.0.1:0", run_id="run", serves=True))
"""


@pytest.mark.parametrize("what", ["the agent is ended", "a rank dies"])
def test_a_rank_that_hears_no_signal_is_killed_soon(what, tmp_path):
    """torch would wait 30 s for it."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT, RANK, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    ranks = []
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2, "two ranks", 60)
        ranks = psutil.Process(agent.pid).children()
        began = time.monotonic()
        if what == "a rank dies":
            ranks[0].kill()
        else:
            agent.terminate()
        agent.wait(timeout=KILL_S + 10)
        assert time.monotonic() - began >= KILL_S
        assert not any(rank.is_running() for rank in ranks)
    finally:
        agent.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        agent.wait()


@pytest.mark.parametrize(("module", "name"), [(TRAINER_RANK, "trainer"), (SCORER_RANK, "scorer")])
def test_an_agent_that_is_told_to_end_says_so_in_one_line(tmp_path, module, name):
    given = ["--ranks", "1", "--module", module, "--", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "engine.trainer.ranks.agent", *given]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    agent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        wait_for(lambda: psutil.Process(agent.pid).children(), "the rank")
        agent.terminate()
        _, said = agent.communicate(timeout=60)
    finally:
        agent.kill()
        agent.wait()
    assert agent.returncode == 1
    assert f"the {name} ranks are ended: SIGTERM" in said
    assert not list(temporary.iterdir())
    assert "Traceback" not in said


def own_environment(folder, environment):
    """What a rank finds in os.environ that is started by a real agent."""
    (folder / "told.py").write_text("import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))")
    path = os.pathsep.join([str(folder), str(ROOT)])
    subprocess.run(
        [sys.executable, "-m", AGENT_MODULE, "--ranks", "1", "--module", "told", "--", str(folder / "said")],
        env=environment | {"PYTHONPATH": path},
        timeout=120,
        check=True,
    )
    return json.loads((folder / "said").read_text())


@pytest.mark.parametrize(
    ("transport", "given", "expected"),
    [
        ("nccl", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, WATCHDOGS["nccl"] | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        ("hccl", {}, WATCHDOGS["hccl"]),
    ],
)
def test_no_watchdog_ends_a_rank_whose_weight_transfer_fails(monkeypatch, tmp_path, transport, given, expected):
    """torch's agent sets some of these in its ranks, unless its own environment has them."""
    for name in WATCHDOGS["nccl"] | WATCHDOGS["hccl"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, ["rollout.engine=vllm", f"weights.transport={transport}"])
    found = own_environment(tmp_path, os.environ | trainer_environment(config, False))
    assert {name: found.get(name) for name in expected} == expected


FAILING = """
import os, signal, sys, time
from pathlib import Path
from torch.distributed.elastic.multiprocessing.errors import record
from engine.trainer.ranks.rank_process import ERROR_FILE, WholeErrorFile

def fail():
    raise RuntimeError("lost its connection" * 5_000_000)  # it takes a while to write that

if os.environ["RANK"] == "0":
    record(fail, WholeErrorFile())()
folder = Path(os.environ[ERROR_FILE]).parent.parent / "0"
while not any(folder.glob("error.json*")):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_ended_while_it_writes_its_error_hides_nothing():
    """torch's agent reads each error file, and failed on one that was half written."""
    agent = [sys.executable, "-c", AGENT, FAILING]
    done = subprocess.run(agent, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("trainer rank 1: Signal 9 (SIGKILL)")
