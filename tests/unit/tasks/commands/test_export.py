"""Which checkpoint a command means. That an exported one has the weights of its run: test_in_run_evaluation.py."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import BadInput, MetronomeError
from engine.run.checkpoint_files import read_marker
from engine.run.files import append_line, write_json
from engine.run.lock import hold_lock
from support.run_folders import a_checkpoint
from tasks.commands.export import export, find_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    for step in (2, 4):
        a_checkpoint(folder / "checkpoints", step)
    return folder


def test_a_checkpoint_is_meant_by_its_folder_or_as_the_one_with_the_best_evaluation(run, tmp_path):
    assert find_checkpoint(str(run / "checkpoints/step-000002")) == run / "checkpoints/step-000002"
    own = {"in_run": True, "model": "base", "protocol": {"samples": 1}}
    for version, score in {0: 0.9, 2: 0.8, 3: 0.7, 4: 0.6}.items():
        append_line(run / "evaluations.jsonl", {"weight_version": version, "avg_at_k": score, **own})
    other = {"in_run": False, "model": str(run / "policy"), "protocol": {"samples": 8}}
    append_line(run / "evaluations.jsonl", {"weight_version": 4, "avg_at_k": 1.0, **other})  # not comparable
    assert find_checkpoint(str(run / "checkpoints/best")) == run / "checkpoints/step-000002"
    for other in ("checkpoints/llama", "a/model", "owner/name"):  # models, and names on the hub
        assert find_checkpoint(other) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step-000003", "there is no such checkpoint; complete ones in .*: step-000002, step-000004"),
        ("step-000004", "state.json is missing; complete ones in .*: step-000002"),
        ("best", r"no evaluation during the run \(evaluate.every\) says which .* is the best; complete ones in"),
    ],
)
def test_one_that_is_not_there_or_not_known_is_refused_with_those_that_are(run, name, message):
    if name == "step-000004":
        (run / "checkpoints/step-000004/state.json").unlink()
    with pytest.raises(BadInput, match=message):
        find_checkpoint(str(run / "checkpoints" / name))


def test_nothing_is_written_over_what_is_there(run, tmp_path):
    with pytest.raises(BadInput, match="--out .*: it exists already"):
        export(run / "checkpoints/step-000002", run)
    lost = a_checkpoint(tmp_path / "published", 2)
    with pytest.raises(BadInput, match="is in no run folder; say where to write by --out FOLDER"):
        export(lost)


def test_a_second_export_waits_for_the_first_and_takes_what_it_has_made(run, capfd):
    checkpoint = run / "checkpoints/step-000002"
    made = run / "exported/step-000002"
    with ThreadPoolExecutor() as threads:
        with hold_lock(run / "exported/.lock", "", 0.0):  # as another process does
            second = threads.submit(export, checkpoint)
            while "is in use by process" not in capfd.readouterr().out:
                assert not second.done(), second.result()
            made.mkdir()
            write_json(made / "checkpoint.json", {"id": read_marker(checkpoint)["id"], "weight_version": 2})
        assert second.result(timeout=10) == made


def test_an_export_that_fails_leaves_the_log_that_it_names_and_nothing_of_the_size_of_a_model(run):
    (run / "exported/.step-000002.partial").mkdir(parents=True)  # what one on a full disk has written
    with pytest.raises(MetronomeError, match="the export exited with 1") as failed:
        export(run / "checkpoints/step-000002")  # it has no weights
    assert sorted(path.name for path in (run / "exported").iterdir()) == [".lock", ".step-000002.log"]
    assert f"its log {run}/exported/.step-000002.log" in str(failed.value)
