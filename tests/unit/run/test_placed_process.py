"""A process that an actor holds."""

import subprocess
import sys

import psutil
import pytest

from engine.run.placed_process import FOLDER, HOST, PlacedProcess
from engine.run.vllm_command import VISIBLE
from support.runs import wait_for

SHOWS = """
import os, sys
print(open(sys.argv[1]).read(), sys.argv[2], os.environ["ONE"], os.environ.get("OMP_NUM_THREADS"))
sys.exit(3)
"""
HOLDER = """
import sys, time
from engine.run.placed_process import PlacedProcess
held = PlacedProcess("node", "host")
held.start("sleeper", [sys.argv[1]], {}, {})
time.sleep(100)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a module that a placed process can run."""

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    return make


def test_it_runs_the_command_with_its_files_and_environment_and_reports_log_and_status(module, monkeypatch):
    module("shows", SHOWS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it
    monkeypatch.setenv(VISIBLE["npu"], "4,5")
    held = PlacedProcess("node", "10.0.0.2")
    assert held.start("shows", [f"{FOLDER}/text", HOST], {"text": "hello"}, {"ONE": "1"}).devices == {
        VISIBLE["npu"]: "4,5"
    }
    printed = b""

    def ended():
        nonlocal printed
        news = held.look()
        printed += news.log
        return news.code == 3

    wait_for(ended, "its end", 20)
    held.stop(0.0)
    assert printed == b"hello 10.0.0.2 1 None\n"


def test_it_ends_with_the_actor(module, tmp_path):
    module(
        "sleeper",
        "import os, sys, time, pathlib\n"
        "from engine.run.process import watch_lifeline\n"
        "watch_lifeline()\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "time.sleep(100)\n",
    )
    file = tmp_path / "pid"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(file)])
    try:
        wait_for(lambda: file.exists() and file.read_text(), "the process", 20)
        process = psutil.Process(int(file.read_text()))
    finally:
        holder.kill()
        holder.wait()
    wait_for(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "its end", 10)
