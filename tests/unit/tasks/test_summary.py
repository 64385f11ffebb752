"""The closing rows of a run, also of one whose folder was lost after its last checkpoint."""

import json

from engine.config import Config
from engine.run.files import append_line, seal
from engine.run.folder import RunFolder
from engine.run.served_model import weight_version
from tasks.summary import training_rows


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
