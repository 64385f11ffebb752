"""Run folders of steps that took what some costs say."""

import json

from engine.config import Config
from engine.run.folder import dump_config
from engine.tools.planner.costs import Costs
from engine.tools.planner.lengths import Lengths
from engine.tools.planner.simulation import simulate_run
from support.compared_runs import step

COSTS = Costs(
    decode_step=0.004,
    decode_response=2e-4,
    decode_context=1e-7,
    prefill_token=1e-4,
    window=0.01,
    micro_batch=0.02,
    token=1e-4,
    square=1e-8,
    update=0.05,
    sync=0.1,
    overhead=0.02,
    train_slowdown=1.2,
    rollout_slowdown=1.1,
)
LENGTHS = Lengths.drawn(200, 800, 100, 2000)
PARTS = ("step_s", "sync_s", "wait_s", "train_s", "update_s", "check_s")


def config(name, folder, mode="periodic", concurrency=4, budget=4096, updates=1):
    return Config(
        run={"name": name, "output": str(folder)},
        train={"mode": mode, "prompts_per_step": 64, "micro_batch_tokens": budget, "updates": updates},
        rollout={
            "group_size": 8,
            "instances": 2,
            "concurrency": concurrency,
            "max_new_tokens": 2000,
            "max_context": 2500,
        },
    )


def simulated_run(made, costs=COSTS, steps=4, seed=0):
    """The folder of a run that took what the costs say."""
    found = simulate_run(made, costs, LENGTHS, seed, steps=steps)
    (made.folder / "trace").mkdir(parents=True)
    dump_config(made, made.folder / "config.toml")
    (made.folder / "trace/all.jsonl").write_text("".join(json.dumps(span) + "\n" for span in found.spans))
    lines = [step(0) | dict.fromkeys(PARTS, 99.0)]  # warms up
    for number, one in enumerate(found.steps, 1):
        seconds = (one.seconds, one.sync_s, one.wait_s, one.train_s, one.update_s, 0.0)
        lines.append(step(number) | dict(zip(PARTS, seconds, strict=True)))
    (made.folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made.folder


def with_model(made, model):
    """The config with another model."""
    return made.model_copy(update={"model": made.model.model_copy(update={"path": str(model)})})
