import json

from engine.config import Config
from engine.tools.planner.calibration import STEPS, measured_step_s, probe_run, probe_settings


def test_probes_tell_the_costs_apart_and_are_short_runs_of_the_recipe(tmp_path):
    config = Config(
        run={"name": "mine", "output": str(tmp_path)},
        rollout={"concurrency": 3, "max_context": 512, "max_new_tokens": 64},
        train={"micro_batch_tokens": 2048, "warmup_steps": 20, "steps": 100, "record": True},
        evaluate={"every": 5},
    )
    keys = list(probe_settings(config))
    assert sorted(each["rollout.concurrency"] for each in keys) == [1, 3, 6, 12]
    assert {each.get("train.micro_batch_tokens", 2048) for each in keys} == {1024, 2048}
    assert {each.get("train.mode", config.train.mode) for each in keys} == {"sync", "periodic"}
    made = probe_run(config, keys[0], "mine-measure-1")
    assert (made.run.name, made.train.steps, made.train.mode) == ("mine-measure-1", STEPS, "sync")
    assert (made.evaluate.every, made.train.record, made.checkpoint.every) == (0, False, 0)
    assert made.rollout.max_new_tokens == 64
    large = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_tokens": 600})})
    assert {each.get("train.micro_batch_tokens") for each in probe_settings(large)} == {
        None
    }  # half would not hold a response
    made.folder.mkdir(parents=True)
    lines = [{"step": step, "step_s": seconds} for step, seconds in enumerate((50.0, 1.0, 3.0, 2.0))]
    (made.folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_step_s(made) == 2.0
