"""Children never outlive their parent, however it ends."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from engine.errors import DeadlineError, ProcessDied
from engine.run import process
from engine.run.process import Child, sweep_folders
from support.runs import ROOT, wait_for

SLEEPER = "import time; from engine.run.process import watch_lifeline; watch_lifeline(); time.sleep(100)"


def family(tmp_path):
    """A parent with a child that has a grandchild, each watching the one above; the pids once all are up."""
    script = textwrap.dedent(f"""
        import pathlib, sys, time
        from engine.run.process import Child, watch_lifeline
        watch_lifeline()
        depth, folder = int(sys.argv[1]), pathlib.Path({str(tmp_path)!r})
        if depth:
            child = Child("child", [sys.executable, __file__, str(depth - 1)])
        (folder / f"pid-{{depth}}").write_text(str(__import__("os").getpid()))
        time.sleep(100)
    """)
    path = tmp_path / "family.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("METRONOME_LIFELINE", None)
    parent = subprocess.Popen([sys.executable, str(path), "2"], env=environment)
    files = [tmp_path / f"pid-{depth}" for depth in (2, 1, 0)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "three generations", 30)
    return parent, [psutil.Process(int(file.read_text())) for file in files]


@pytest.mark.parametrize("victim", [0, 1])
def test_killing_one_ends_all_below(tmp_path, victim):
    parent, generations = family(tmp_path)
    try:
        generations[victim].kill()
        below = generations[victim + 1 :]
        wait_for(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in below), "their end", 5)
        assert generations[0].is_running() == (victim == 1) or generations[0].status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()


def test_a_parent_that_was_gone_before_the_child_looked(tmp_path):
    environment = {**os.environ, "METRONOME_LIFELINE": str(tmp_path / "gone" / "lifeline"), "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    child = subprocess.run([sys.executable, "-c", SLEEPER], env=environment, start_new_session=True, timeout=30)
    assert child.returncode == -9
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("name", ["lifeline", "metronome-notes/lifeline"])
def test_a_wrong_lifeline_removes_no_folder_of_the_users(tmp_path, name):
    kept = tmp_path / name
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("")
    environment = {**os.environ, "METRONOME_LIFELINE": str(kept), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SLEEPER], env=environment, start_new_session=True, timeout=30)
    assert kept.exists()


def test_messages_say_how_a_child_ended(tmp_path):
    log = tmp_path / "log"
    failing = Child("worker-7", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], log)
    failing.process.wait(30)
    with pytest.raises(ProcessDied, match=r"worker-7 exited with 3(.|\n)*the reason"):
        failing.check_alive()
    sleeping = Child("sleeper", [sys.executable, "-c", SLEEPER], log)
    assert sleeping.alive
    sleeping.stop(0.0)
    assert "SIG" in sleeping.how_it_ended()


def test_what_a_killed_process_left_in_memory_is_removed_and_what_a_living_one_holds_stays():
    code = (
        "from engine.run.process import hold_lifeline; import time; print(hold_lifeline(), flush=True); time.sleep(60)"
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    try:
        killed, young, living = pipes = [Path(holder.stdout.readline().strip()) for holder in holders]
        for holder in holders[:2]:
            holder.kill()
            holder.wait()
        for pipe in (killed, living):
            os.utime(pipe, (time.time() - 3600, time.time() - 3600))
        sweep_folders(killed.parent.parent)
        assert [pipe.exists() for pipe in pipes] == [False, True, True]
        os.utime(young, (time.time() - 3600, time.time() - 3600))
        sweep_folders(young.parent.parent)
        assert [pipe.parent.exists() for pipe in pipes] == [False, False, True]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_a_process_that_even_sigkill_does_not_end_is_named(tmp_path, monkeypatch):
    """As one that waits for a disk in the kernel."""
    monkeypatch.setattr(process, "KILLED_S", 0.2)
    monkeypatch.setattr(process, "signal_group", lambda group, number: None)
    children = [Child(name, [sys.executable, "-c", "import time; time.sleep(600)"]) for name in ("one", "two")]
    try:
        with pytest.raises(DeadlineError, match=r"one .process \d+. has not ended 0.2 s after SIGKILL.*; two .process"):
            process.stop_all(children, 0.1)
    finally:
        monkeypatch.undo()
        process.stop_all(children, 0.0)
