"""The closing rows of a run, also of one whose folder was lost after its last checkpoint."""

import json

import pytest

from engine.config import Config
from engine.run.files import append_line, seal
from engine.run.folder import RunFolder
from engine.run.served_model import weight_version
from tasks.stages.summary import training_rows


def test_the_rows_of_a_training(tmp_path):
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    config.folder.mkdir()
    for step, reward in enumerate((0.25, 0.5, 0.75)):
        append_line(
            RunFolder(config.folder).steps,
            {"step": step, "reward_mean": reward, "step_s": 2.0, "tokens_per_s_per_device": 100.0 * step},
        )
    rows = training_rows(config)
    assert rows["reward"] == "0.250 (step 0) to 0.750 (step 2)"
    assert rows["speed"] == "0.50 steps/s, 150 trained tokens/s/device"  # without the first step


def test_the_lengths_and_the_alignment_of_gradients_are_rows(tmp_path):
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    config.folder.mkdir()
    for step in range(3):
        figures = {"step": step, "reward_mean": 0.5, "step_s": 2.0, "tokens_per_s_per_device": 1.0, "grad_cosine": 0.02}
        lengths = {"mean": 100.0, "p90": 300, "max": 900, "tail": 0.6}
        line = figures | {f"response_length_{name}": value for name, value in lengths.items()}
        append_line(RunFolder(config.folder).steps, line)
    rows = training_rows(config)
    assert rows["responses"] == "mean 100 tokens, 90 % up to 300, longest 900; 60% in the longest tenth"
    assert rows["|cosine|"] == "mean 0.020, p90 0.020, 100% up to 0.1"
    assert "warning" not in rows


@pytest.mark.parametrize(("equal", "told"), [((4, 4), True), ((4, 3), False)])
def test_a_run_whose_scores_never_differed_says_that_it_learned_nothing_and_where_to_look(tmp_path, equal, told):
    config = Config(run={"name": "mine", "output": str(tmp_path)}, train={"prompts_per_step": 4})
    folder = RunFolder(config.folder)
    folder.responses.mkdir(parents=True)
    folder.samples_of(0).touch()
    for step, count in enumerate(equal):
        figures = {"step": step, "reward_mean": 0.0, "step_s": 2.0, "tokens_per_s_per_device": 1.0}
        append_line(folder.steps, figures | {"equal_groups": count})
    said = training_rows(config).get("learned nothing", "")
    where = f"{folder.samples_of(0)}, metronome try-reward"
    assert said == (f"all 8 groups had equal scores; why: {where}" if told else "")


def test_a_run_whose_folder_was_lost_when_it_had_trained(tmp_path):
    """What a resume fetches from checkpoint.path is its last checkpoint, and no steps."""
    config = Config(run={"name": "mine", "output": str(tmp_path)})
    folder = RunFolder(config.folder)
    checkpoint = folder.checkpoints / "step-000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_SUCCESS.json").write_text(json.dumps(seal({"step": 7, "files": {}})))
    rows = training_rows(config)
    assert "lost" in rows["reward"]
    assert "speed" not in rows
    assert rows["trained policy"] == str(folder.policy)
    assert weight_version(folder.policy) == 7
    assert weight_version(tmp_path / "base") == 0
