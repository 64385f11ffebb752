"""Two steps of the trainer for each of the given cases on an NPU that is not there: `python fake_npu_steps.py < CASES`

A case is a line of JSON: name, recipe, and keys that are set over it. Model and layout are tiny, all else is the
recipe's. Prints for each case a line with its name and its error, "" if it has none.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
warnings.simplefilter("ignore")  # absent Transformer Engine and Apex

from common import random_qwen3  # noqa: E402
from fake_device import FakeNpu, fake_npu  # noqa: E402

from engine.config.recipe import load_config  # noqa: E402
from engine.errors import BadInput  # noqa: E402
from engine.tools.acceptance.run_parts import random_group  # noqa: E402
from engine.trainer.policy import Policy  # noqa: E402

LENGTHS = (9, 20, 3, 14)
SMALL = {
    **{f"parallel.{key}": 1 for key in ("tensor", "pipeline", "context", "data", "nodes")},
    **{"parallel.rendezvous": '""', "parallel.sequence": "false", "rollout.instances": 1, "rollout.devices": "[]"},
    **{"rollout.engine": "embedded", "rollout.tensor": 1, "rollout.vllm": "{}", "weights.transport": "file"},
    **{"train.dtype": "bfloat16", "model.dtype": "bfloat16", "train.ratio_gap_limit": 0, "run.name": "run"},
    **{"train.micro_batch_tokens": 64, "train.prompts_per_step": 2, "train.updates": 1, "train.warmup_steps": 0},
    **{"rollout.group_size": len(LENGTHS), "rollout.max_context": 512, "rollout.max_new_tokens": 64},
    **{"dry_run.joining": 0, "algorithm.overlong_buffer": 0, "evaluate.max_context": 0, "platform.device": "auto"},
}


def train(recipe, keys, folder):
    config = load_config(recipe, [f"{key}={value}" for key, value in (SMALL | keys).items()] + [f"run.output={folder}"])
    policy = Policy(config, FakeNpu())
    for step in range(2):
        policy.start_step(step)
        for seed in range(2):
            group = random_group(prompt=16, lengths=LENGTHS, vocabulary=512, seed=seed)
            policy.prepare([group])
            policy.accumulate([group])
            policy.worst_gap()
        policy.update(2 * len(LENGTHS))
        policy.figures()
        policy.probe(list(range(20)))
        assert len(list(policy.tensors())) > 10


no_memory = patch.multiple(FakeNpu, peak_bytes=lambda self: 0, held_bytes=lambda self: 0)
with tempfile.TemporaryDirectory() as place, fake_npu(), no_memory:
    model = random_qwen3(Path(place) / "model", hidden=128, layers=2, vocabulary=512, context=1024)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            train(case["recipe"], {"model.path": model, **case["keys"]}, place)
            error = ""
        except (BadInput, RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        print("CASE", json.dumps({"name": case["name"], "error": error}), flush=True)
