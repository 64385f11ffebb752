"""What Prefect shows of a flow run: its name and its Logs tab; tests/stack has the server."""

import logging
import re
from uuid import uuid4

import pytest
from prefect.logging import handlers

from engine.errors import ProcessDied
from engine.run.folder import RunFolder
from tasks.cluster import flow_run
from tasks.cluster.flow_run import name_flow_run, name_of, send_output, shorten_line
from tasks.cluster.local_server import log_prefect_to
from tasks.terminal import console


def test_a_flow_run_has_the_runs_name_and_the_number_of_the_try(tmp_path):
    folder = RunFolder(tmp_path / "night")
    folder.path.mkdir()
    assert name_of(folder) == "night"
    for what in ("flow", "training", "training"):
        folder.fence.begin_attempt(what, "")
    assert name_of(folder) == "night"
    folder.fence.begin_attempt("flow", "")
    assert name_of(folder) == "night (try 2)"


@pytest.mark.parametrize("worked", [True, False])
def test_lines_in_a_workers_output_have_time_and_run(worked, monkeypatch, capsys):
    monkeypatch.setattr(flow_run, "WORKED", "WORKED")  # with Prefect's own variable a server would be asked
    if worked:
        monkeypatch.setenv("WORKED", "1")
    try:
        name_flow_run("night-7")
        console.say("train", "5/12 steps")
    finally:
        console.mark_lines("")
    found = re.fullmatch(r"(\d\d:\d\d:\d\d night-7: )?train        5/12 steps\n", capsys.readouterr().out)
    assert bool(found[1]) == worked


def test_the_logs_tab_gets_what_the_console_shows_and_why_a_run_failed(monkeypatch, capsys):
    number = str(uuid4())
    sent = []
    monkeypatch.setattr(handlers, "_api_log_sink", sent.append)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", number)
    console.say("train", "before")

    def run():
        console.say("train", "1/2 steps")
        console.say("rewards", "3 of 8 scores timed out")
        console.print_table("Run day", {"reward": "0.5"})
        raise ProcessDied("the trainer was ended by SIGKILL")

    with pytest.raises(ProcessDied), send_output():
        run()
    console.say("train", "after")
    assert [(one["message"], one["level"], one["flow_run_id"]) for one in sent] == [
        ("train        1/2 steps", logging.INFO, number),
        ("rewards      3 of 8 scores timed out", logging.WARNING, number),
        ("Run day\n  reward  0.5", logging.INFO, number),
        ("error: the trainer was ended by SIGKILL", logging.ERROR, number),
    ]
    shown = capsys.readouterr().out
    assert "before" in shown
    assert "after" in shown


def test_prefects_lines_about_retries_and_cancelled_runs():
    retry = {"msg": "Failed with %s: %r - Retry %s/%s will start %s", "args": ("error", "x", 1, 1_000_000, "at once")}
    record = logging.makeLogRecord(retry)
    assert shorten_line(record)
    assert record.getMessage() == "Failed with error: 'x' - retry 1 will start at once"
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
