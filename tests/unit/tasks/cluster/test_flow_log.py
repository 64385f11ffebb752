"""What Prefect's Logs tab gets; tests/stack has the server."""

import logging
from uuid import uuid4

import pytest
from prefect.logging import handlers

from engine.errors import ProcessDied
from tasks.cluster.flow_log import send_output
from tasks.cluster.local_server import log_prefect_to
from tasks.terminal import console


def test_the_logs_tab_gets_what_the_console_shows(monkeypatch, capsys):
    number = uuid4()
    sent = []
    monkeypatch.setattr(handlers, "_api_log_sink", sent.append)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(number))
    console.say("train", "before")
    with send_output():
        console.say("train", "1/2 steps")
        console.say("rewards", "3 of 8 scores timed out")
        console.print_table("Run day", {"reward": "0.5"})
    console.say("train", "after")
    told = [(one["message"], one["level"], one["flow_run_id"]) for one in sent]
    assert told == [
        ("train        1/2 steps", logging.INFO, str(number)),
        ("rewards      3 of 8 scores timed out", logging.WARNING, str(number)),
        ("Run day\n  reward  0.5", logging.INFO, str(number)),
    ]
    assert "before" in (shown := capsys.readouterr().out)
    assert "after" in shown


def test_the_logs_tab_says_why_a_run_failed(monkeypatch):
    sent = []
    monkeypatch.setattr(handlers, "_api_log_sink", sent.append)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    with pytest.raises(ProcessDied), send_output():
        raise ProcessDied("the trainer was ended by SIGKILL")
    assert [(one["message"], one["level"]) for one in sent] == [
        ("error: the trainer was ended by SIGKILL", logging.ERROR)
    ]


def test_prefects_lines_about_retries_and_cancelled_runs():
    import logging

    from tasks.cluster.flow_log import shorten_line

    record = logging.makeLogRecord(
        {
            "msg": "Task run failed with %s: %r - Retry %s/%s will start %s",
            "args": ("exception", "x", 1, 1_000_000, "immediately"),
        }
    )
    assert shorten_line(record)
    assert record.getMessage() == "Task run failed with exception: 'x' - retry 1 will start immediately"
    ended = {"msg": "Crash detected! Execution was aborted by a termination signal."}
    assert not shorten_line(logging.makeLogRecord(ended))
    assert shorten_line(logging.makeLogRecord({"msg": "Crash detected! Out of memory."}))


def test_prefects_log_may_be_in_a_folder_that_is_not_there_yet(tmp_path, monkeypatch):
    """With a server of others nobody has made the folder of the runs by then."""
    logger = logging.getLogger("prefect")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    log_prefect_to(tmp_path / "new/prefect.log")
    logger.error("told")
    assert "ERROR prefect told" in (tmp_path / "new/prefect.log").read_text()
