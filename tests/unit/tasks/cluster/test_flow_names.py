import re

import pytest

from engine.run.folder import RunFolder
from tasks.cluster import flow_names
from tasks.cluster.flow_names import name_flow_run, name_of
from tasks.terminal.console import mark_lines, say


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
    monkeypatch.setattr(flow_names, "WORKED", "WORKED")  # with Prefect's own variable a server would be asked
    if worked:
        monkeypatch.setenv("WORKED", "1")
    try:
        name_flow_run("night-7")
        say("train", "5/12 steps")
    finally:
        mark_lines("")
    found = re.fullmatch(r"(\d\d:\d\d:\d\d night-7: )?train        5/12 steps\n", capsys.readouterr().out)
    assert bool(found[1]) == worked
