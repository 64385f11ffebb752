import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from engine.errors import BadInput
from engine.run.lock import check_not_held, hold_lock, is_held

HOLD = """
import sys, time
from pathlib import Path
from engine.run.lock import hold_lock
with hold_lock(Path(sys.argv[1]), "run folder a", 0.0):
    print("held", flush=True)
    time.sleep(60)
"""


GIVE = """
import subprocess, sys, time
from pathlib import Path
from engine.run.lock import hold_lock
with hold_lock(Path(sys.argv[1]), "run folder a", 0.0) as lock:
    print(subprocess.Popen(["sleep", "60"], pass_fds=[lock], stdout=subprocess.DEVNULL).pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder():
    """(lock file, a process that holds it). Other users can see the file, unlike those in pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder) / "a/lock"
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "held\n"
        yield file, process
        process.kill()
        process.wait()


def test_who_holds_it_is_named(holder):
    file, process = holder
    with (
        pytest.raises(BadInput, match=rf"run folder a is in use by process {process.pid} on "),
        hold_lock(file, "run folder a", 0.0),
    ):
        pass


def test_only_its_owner_can_open_it(tmp_path):
    file = tmp_path / "lock"
    file.touch(0o644)
    with hold_lock(file, "run folder a", 0.0):
        assert file.stat().st_mode & 0o777 == 0o600


def test_who_inherits_the_open_file_holds_the_lock_and_is_waited_for(tmp_path):
    """As an orchestrator whose flow was killed."""
    file = tmp_path / "lock"
    flow = subprocess.Popen([sys.executable, "-c", GIVE, str(file)], stdout=subprocess.PIPE, text=True)
    heir = int(flow.stdout.readline())
    flow.kill()
    flow.wait()
    assert is_held(file)
    check_not_held(file, "run folder a")  # it ends in a moment
    threading.Timer(1.0, os.kill, (heir, signal.SIGKILL)).start()
    said = []
    with hold_lock(file, "run folder a", 0.0, said.append):
        assert not Path(f"/proc/{heir}").exists() or "Z" in Path(f"/proc/{heir}/stat").read_text()
    assert len(said) == 1


@contextlib.contextmanager
def another_user(file):
    """As one that may see a file and not open it."""
    root = os.geteuid() == 0
    file.chmod(0o600 if root else 0)
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        file.chmod(0o600)


def test_another_users_lock_cannot_be_taken(holder):
    """Only its owner can open it."""
    file, _ = holder
    with another_user(file):
        check_not_held(file, "run folder a")
        assert not is_held(file)
        owner = file.owner()
        with pytest.raises(BadInput, match=rf"run folder a cannot be locked: .*{file}; {file} is {owner}'s"):
            hold_lock(file, "run folder a", 0.0).__enter__()


def test_a_lock_that_cannot_be_read_is_not_taken_for_free(tmp_path):
    """`metronome prune` deletes what nobody holds."""
    (tmp_path / "loop.lock").symlink_to("loop.lock")
    with pytest.raises(OSError, match="loop.lock"):
        check_not_held(tmp_path / "loop.lock", "model a")


def test_a_killed_holder_gives_it_back(holder):
    file, process = holder
    said = []
    process.kill()
    for wait_s in (10.0, 0.0):  # and so does one that is through
        with hold_lock(file, "run folder a", wait_s, said.append):
            pass
    assert len(said) <= 1


def test_who_waits_says_so_once_and_waits_as_long_as_the_holder_makes_progress(holder):
    file, process = holder
    began = time.monotonic()
    moving = lambda: min(4, int(4 * (time.monotonic() - began)))  # noqa: E731
    said = []
    with pytest.raises(BadInput, match=r"waited 1 s"), hold_lock(file, "run folder a", 1.2, said.append, moving):
        pass
    assert time.monotonic() - began > 1.9
    assert len(said) == 1
    assert "waiting up to 1 s" in said[0]
    ending = threading.Timer(3.0, process.kill)
    ending.start()
    began = time.monotonic()
    with hold_lock(file, "run folder a", 1.5, progress=lambda: int(2 * time.monotonic())):
        assert time.monotonic() - began > 2.5
    ending.join()
