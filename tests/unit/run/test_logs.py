"""What processes write to their logs."""

import re
import sys

from engine.run import logs
from engine.run.process import Child

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


def test_messages_in_a_log_have_their_time_and_are_found_without_it(tmp_path):
    code = "from engine.run.logs import log_error, log_line; log_line('begins'); log_error('error: it ends')"
    child = Child("one", [sys.executable, "-c", code], tmp_path / "one.log")
    assert child.process.wait(30) == 0
    first, last = (tmp_path / "one.log").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} begins", first)
    assert last.endswith(" error: it ends")
    assert logs.last_message(tmp_path / "one.log", "error: ") == "error: it ends"
    assert logs.last_message(tmp_path / "one.log", "warning: ") == ""
