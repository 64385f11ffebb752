"""One rank of test_memory.py: `python memory_rank.py CASE` (JSON: overrides) prints real and computed bytes as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state

sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[2])]

from engine import platform  # noqa: E402
from engine.config import recipe  # noqa: E402
from engine.run.memory import _states, rank_parameters  # noqa: E402
from engine.trainer.policy import Policy  # noqa: E402


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def of_optimizer(policy):
    """Moments and master weights; shards of the distributed optimizer are tensors of their own storage offset."""
    own = {parameter.data_ptr() for parameter in policy.models.policy.parameters()}
    total = 0
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        states = part.optimizer.state.values()
        total += size(
            value for state in states for value in state.values() if torch.is_tensor(value) and value.numel() > 1
        )
        if policy.config.train.dtype == "bfloat16":
            masters = [master for group in part.optimizer.param_groups for master in group["params"]]
            total += size(master for master in masters if master.data_ptr() not in own)
    return total


def main():
    config = recipe.load_config(None, json.loads(sys.argv[1]))
    layout = config.parallel
    sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "expert")}
    with platform.parallel_session(platform.get_platform("cpu"), 0, **sizes):
        policy = Policy(config, platform.get_platform("cpu"))
        policy.start_step()
        policy.reduce_gradients(1)
        policy.step_optimizer()
        held = rank_parameters(policy.models.shape, layout, parallel_state.get_pipeline_model_parallel_rank())
        buffers = policy.ddp.buffers + policy.ddp.expert_parallel_buffers
        real = {
            "weights": size(policy.models.policy.parameters()),
            "gradients": size(buffer.grad_data for buffer in buffers),
            "optimizer": of_optimizer(policy),
        }
        computed = {term.name: term.bytes for term in _states(held, config)}
        Path(os.environ["REPORT"]).write_text(json.dumps({name: [real[name], computed[name]] for name in real}))


if __name__ == "__main__":
    main()
