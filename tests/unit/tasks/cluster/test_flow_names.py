from engine.run.files import append_line
from engine.run.folder import RunFolder
from tasks.cluster.flow_names import name_of


def test_a_flow_run_has_the_runs_name_and_the_number_of_the_try(tmp_path):
    folder = RunFolder(tmp_path / "night")
    folder.path.mkdir()
    assert name_of(folder) == "night"
    append_line(folder.attempts, {"what": "flow"})
    append_line(folder.attempts, {"what": "training"})
    append_line(folder.attempts, {"what": "training"})
    assert name_of(folder) == "night"
    append_line(folder.attempts, {"what": "flow"})
    assert name_of(folder) == "night (try 2)"
