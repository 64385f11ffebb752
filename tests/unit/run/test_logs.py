"""Logs that grow."""

import asyncio
import re
import subprocess
import sys
import time

import pytest

from engine.run import logs
from engine.run.process import Child

PRINTS = "import sys\nfor number in sys.stdin: print('x' * 99 + number, end='', flush=True)"

RAISES = """
import asyncio, logging, threading
from engine.run.process import watch_lifeline
watch_lifeline()

def fails(*_):
    raise ValueError("\\x1b[2Jwhere http://user:hunter2@host/x is")

thread = threading.Thread(target=fails, name="helper")
thread.start()
thread.join()
asyncio.new_event_loop().call_exception_handler({"message": "lost", "exception": ValueError("\\x1b[2J\\x9b7m")})
try:
    fails()
except ValueError:
    logging.getLogger("library").exception("it logs")

class Fails:
    __del__ = fails

Fails()
fails()
"""


def test_no_traceback_has_a_password_or_a_control_character(tmp_path):
    child = Child("one", [sys.executable, "-c", RAISES], tmp_path / "one.log")
    assert child.process.wait(30) == 1
    said = (tmp_path / "one.log").read_text()
    assert said.count("Traceback (most recent call last)") >= 4
    assert said.count(r"ValueError: \x1b[2Jwhere http://host/x is") == 4
    assert "exception in thread helper:" in said
    assert not re.search("hunter2|[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)


def test_a_log_that_has_grown_is_put_aside_while_its_process_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    log = tmp_path / "instance-0.log"
    with log.open("ab") as file:  # as Child opens it
        process = subprocess.Popen([sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, stdout=file, text=True)
    written = []
    for number in range(40):
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        deadline = time.monotonic() + 10
        while not log.read_text().endswith(f"x{number}\n"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        written.append(number)
        logs.rotate_logs(tmp_path)
        if log.stat().st_size == 0:
            break
    process.stdin.write("last\n")
    process.stdin.close()
    assert process.wait(10) == 0
    assert log.read_text() == "x" * 99 + "last\n"
    before = (tmp_path / "instance-0.log.1").read_text().split()
    assert [int(line.strip("x")) for line in before] == written


@pytest.mark.parametrize(("size", "aside"), [(999, False), (1000, True)])
def test_a_log_is_put_aside_once_it_has_its_size(tmp_path, monkeypatch, size, aside):
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    (tmp_path / "one.log").write_bytes(b"x" * size)
    logs.rotate_logs(tmp_path)
    assert (tmp_path / "one.log").stat().st_size == (0 if aside else size)
    assert (tmp_path / "one.log.1").exists() == aside


def test_a_small_log_stays(tmp_path):
    child = Child("one", [sys.executable, "-c", "print('here')"], tmp_path / "one.log")
    child.process.wait(30)
    logs.rotate_logs(tmp_path)
    assert (tmp_path / "one.log").read_text() == "here\n"
    assert not (tmp_path / "one.log.1").exists()


def test_logs_are_looked_at_again_and_again(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(logs, "EVERY_S", 0.01)
    log = tmp_path / "one.log"

    async def grown_twice():
        async with logs.kept_small(tmp_path):
            for letter in "ab":
                log.write_text(letter * 1000)
                async with asyncio.timeout(10):
                    while log.stat().st_size:
                        await asyncio.sleep(0.01)
                assert (tmp_path / "one.log.1").read_text() == letter * 1000
        log.write_text("c" * 1000)
        await asyncio.sleep(0.1)
        assert log.stat().st_size == 1000

    asyncio.run(grown_twice())


def test_what_is_put_aside_of_a_process_that_prints_fast_has_no_more_than_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    (tmp_path / "one.log").write_bytes(b"old" * 100_000 + b"new" * 333 + b"\n")
    logs.rotate_logs(tmp_path)
    assert (tmp_path / "one.log.1").read_text() == "new" * 333 + "\n"
    assert logs.EVERY_S <= 1.0


def test_messages_in_a_log_have_their_time_and_are_found_without_it(tmp_path):
    code = "from engine.run.logs import log_error, log_line; log_line('begins'); log_error('error: it ends')"
    child = Child("one", [sys.executable, "-c", code], tmp_path / "one.log")
    assert child.process.wait(30) == 0
    first, last = (tmp_path / "one.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} begins", first)
    assert last.endswith(" error: it ends")
    assert logs.last_message(tmp_path / "one.log", "error: ") == "error: it ends"
    assert logs.last_message(tmp_path / "one.log", "warning: ") == ""
