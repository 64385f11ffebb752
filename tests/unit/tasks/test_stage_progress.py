import json
import os
import time

from engine.config import Config
from engine.orchestrator.evaluation_progress import EvaluationProgress
from engine.run.checkpoint_files import folder_of, partial_of
from engine.run.files import write_unsynced
from engine.run.folder import RunFolder
from tasks import stage_progress

STEP = {"ready": True, "instances": 2, "met": 2, "running": 16, "tokens_per_s": 1234, "step": 12, "expected": 32}


def config_in(folder, **tables):
    config = Config(run={"name": "run", "output": str(folder)}, train={"steps": 50}, **tables)
    RunFolder(config.folder).logs.mkdir(parents=True)
    return config


def test_how_far_a_step_is(tmp_path):
    config = config_in(tmp_path)
    look = stage_progress.training(config)
    assert look().text == "starting the orchestrator"
    file = RunFolder(config.folder).progress
    for row, text, share in (
        ({"ready": False}, "loading the models; starting", None),
        ({"ready": False, "instances": 2, "met": 1}, "loading the models; 1 of 2 instances answer", None),
        ({"ready": False, "instances": 0, "met": 1}, "loading the models; 1 instances have joined", None),
        ({"ready": True, "instances": 0, "met": 0}, "waiting for an instance", None),
        ({"ready": True, "instances": 2, "met": 2}, "weights are on their way to the instances", None),
        ({"ready": True, "done": 50}, "the last checkpoint and the policy are written", 1.0),
        (
            STEP | {"arrived": 0, "trained": 0},
            "12/50 steps; in the next: waiting for the first of 32 groups; 16 responses run, 1,234 tokens/s",
            0.24,
        ),
        (STEP | {"arrived": 9, "trained": 4}, "12/50 steps; in the next: 4 of 32 groups trained, 9 sampled", 0.2425),
        (
            STEP | {"arrived": 32, "trained": 32, "evaluation": {"version": 12, "finished": 7, "expected": 256}},
            "12/50 steps; in the next: 32 of 32 groups trained; evaluating version 12: 7 of 256 responses",
            0.26,
        ),
    ):
        write_unsynced(file, row)
        assert (look().text, look().share) == (text, share)
    file.write_text(json.dumps(STEP)[:20])
    assert look().text == "starting the orchestrator"
    file.unlink()
    assert look().text == "the orchestrator ends its processes"


def test_a_checkpoint_that_is_fetched_before_training(tmp_path):
    config = config_in(tmp_path)
    folder = RunFolder(config.folder)
    write_unsynced(folder.progress, {"ready": False})
    partial = partial_of(folder_of(folder.checkpoints, 40))
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"w" * 2**21)
    assert stage_progress.training(config)().text == "fetching a checkpoint: 2.0 MiB so far"
    then = time.time() - 3600  # left by a killed run
    os.utime(partial / "__0_0.distcp", (then, then))
    assert stage_progress.training(config)().text == "loading the models; starting"


def test_how_far_an_evaluation_is():
    progress = EvaluationProgress()
    look = stage_progress.evaluation(progress, 1)
    assert look().text == "starting 1 instance"
    progress.expected = 8
    assert look() == stage_progress.StageProgress("0 of 8 responses", 0.0)
    progress.finished = 4
    progress.count_group([1.0, 0.0, 1.0, 1.0])
    assert look() == stage_progress.StageProgress("4 of 8 responses, accuracy of these 0.750", 0.5)
    progress.finished = 8
    progress.count_group([0.5, 0.0, 0.0, 0.0])
    assert look() == stage_progress.StageProgress("8 responses are scored; votes and intervals", 1.0)
    progress.expected = 16
    assert look().text == "8 of 16 responses, mean reward of these 0.438"


def test_how_far_a_conversion_is(tmp_path):
    log = tmp_path / "convert.log"
    look = stage_progress.conversion(log)
    assert look().text == "loading torch, Megatron and transformers"
    log.write_text("a warning\n")
    assert look().text == "loading torch, Megatron and transformers"
    log.write_text("a warning\nprogress: part 1 of 4: x\nprogress: part 2 of 4: and back, 3 of 5 tensors\nanother\n")
    assert look().text == "part 2 of 4: and back, 3 of 5 tensors"


def test_how_far_a_copy_is():
    done = [0]
    look = stage_progress.copied("uploaded", lambda: done[0], 4 * 2**30)
    assert look() == stage_progress.StageProgress("uploaded: 0.0 MiB of 4.00 GiB", 0.0)
    done[0] = 300 * 2**20
    assert look() == stage_progress.StageProgress("uploaded: 300.0 MiB of 4.00 GiB", 300 / 4096)
    done[0] = 2**30
    assert look() == stage_progress.StageProgress("uploaded: 1.00 GiB of 4.00 GiB", 0.25)
