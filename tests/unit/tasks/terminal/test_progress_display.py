import os
import pty
import subprocess
import sys
import time

import pytest

from engine.run.progress import Progress, write_progress
from tasks.terminal import console, progress_display
from tasks.terminal.progress_display import copied, show_progress, written

SLOW = """
import time
from engine.run.progress import Progress
from tasks.terminal import console
from tasks.terminal.progress_display import show_progress
began = time.monotonic()
with show_progress("evaluate", lambda: Progress("7 of 10 responses", min(1.0, (time.monotonic() - began) / 4))):
    time.sleep(1.2)
    console.say("train", "a line beside it")
    time.sleep(0.6)
console.say("evaluate", "done")
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(console, "QUIET_S", 0.3)
    monkeypatch.setattr(progress_display, "LOOK_S", 0.02)


def test_a_quiet_stage_prints_a_line_now_and_then(quick, capsys):
    console.say("evaluate", "...")
    began = time.monotonic()
    with show_progress("evaluate", lambda: Progress("5 of 10 responses", (time.monotonic() - began) / 10)):
        time.sleep(2.5)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert 2 <= len(lines) <= 3  # after 0.3, 0.9 and 2.1 s
    for line in lines:
        assert line.startswith("evaluate     5 of 10 responses  0:")
        assert line.endswith(" left")


def test_a_stage_that_prints_lines_of_its_own_gets_no_others(quick, capsys, monkeypatch):
    monkeypatch.setattr(console, "QUIET_S", 0.49)  # of ten lines in half a second, a busy machine delays some
    with show_progress("train", lambda: Progress("in step 3")):
        for number in range(10):
            console.say("train", f"step {number}")
            time.sleep(0.05)
    assert "in step 3" not in capsys.readouterr().out


def test_a_stage_whose_progress_is_not_known_says_nothing(quick, capsys):
    with show_progress("convert", lambda: None):
        time.sleep(0.8)
    assert capsys.readouterr().out == ""


def test_the_time_left_counts_from_the_first_share_that_is_known(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    left = progress_display._TimeLeft()
    now[0] = 500.0  # models were loaded until now
    assert [left(None), left(0.5)] == ["", ""]
    now[0] = 510.0
    assert left(0.6) == "  0:40 left"
    assert left(1.0) == ""  # what follows the work that is counted, and is of unknown length


def on_a_terminal(code, **variables):
    """What a program shows on a terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", "COLUMNS": "120", **variables}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the terminal is closed at the program's end
        pass
    os.close(ours)
    assert child.wait(60) == 0
    return shown.decode()


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end():
    shown = on_a_terminal(SLOW)
    assert "━" in shown
    assert "7 of 10 responses" in shown
    assert "a line beside it" in shown
    assert "\x1b[1;36m" in shown  # colours
    assert shown.rindex("\x1b[?25h") > shown.rindex("━")  # the cursor is back
    assert "━" not in shown[shown.rindex("\x1b[2K") :]
    assert shown.rstrip().endswith("done")


def test_a_bar_obeys_no_text():
    text = "[red]reward[/red] \x1b]0;owned\x07 of"
    shown = on_a_terminal(SLOW.replace('"7 of', f'{text!r} + "7 of'))
    assert r"[red]reward[/red] \x1b]0;owned\x07 of7 of 10" in shown
    assert "\x1b]0;owned" not in shown


def test_a_pipe_has_neither_colours_nor_bars():
    environment = os.environ | {"TERM": "xterm", "FORCE_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines() == ["train        a line beside it", "evaluate     done"]
    assert done.stderr == ""


def test_what_another_process_writes_is_shown_as_it_is(tmp_path):
    file = tmp_path / "progress.json"
    look = written(file, "before")
    assert look() == Progress("before")
    for progress in (Progress("part 1 of 4"), Progress("3/4 steps", 0.75)):
        write_progress(file, progress)
        assert look() == progress
    file.write_text('{"text": "3/4 st')
    assert look() == Progress("before")


def test_how_far_a_copy_is():
    done = [0]
    look = copied("uploaded", lambda: done[0], 4 * 2**30)
    assert look() == Progress("uploaded: 0.0 MiB of 4.0 GiB", 0.0)
    done[0] = 300 * 2**20
    assert look() == Progress("uploaded: 300.0 MiB of 4.0 GiB", 300 / 4096)
    done[0] = 2**30
    assert look() == Progress("uploaded: 1.0 GiB of 4.0 GiB", 0.25)


def test_the_line_of_a_step_writes_both_of_its_numbers_alike(capsys):
    line = console.StepLines(1600)
    for step in (0, 1599):
        line({"step": step, "step_s": 1.0, "reward_mean": 0.5, "tokens_per_s_per_device": 1234.0})
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("train            1/1,600 steps  reward 0.500  1,234 tokens/s/device")
    assert last.startswith("train        1,600/1,600 steps ")
