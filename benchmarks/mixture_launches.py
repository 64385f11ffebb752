"""How many operators a layer of experts starts on a trainer rank, and how many bytes it copies to stack weights:
`python benchmarks/mixture_launches.py [--experts N]`

A mixture in bf16 runs on the CPU with torch's grouped product in the place of CUDA's. Counted are operators without
those that only make views, of one micro-batch and of an update with AdamW; a layer's are the difference of models of
three and two layers. With PYTHONPATH=OTHER_CHECKOUT it counts there. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from common import result
from fake_device import VIEWS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


class Operators(TorchDispatchMode):
    """Counts operators by name, and the bytes that `stack` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.stacked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.started[name] += 1
        if name == "stack":
            self.stacked += made.nbytes
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=128)
    experts = parser.parse_args().experts
    warnings.simplefilter("ignore")  # absent Transformer Engine and Apex
    from engine import platform

    with tempfile.TemporaryDirectory() as folder, platform.single_session(platform.get_platform("cpu")):
        fewer, more = (counted(Path(folder) / str(layers), layers, experts) for layers in (2, 3))
    figures = {name: more[name] - fewer[name] for name in fewer}
    for name, value in figures.items():
        print(f"{name} per layer: {value}")
    result(figures)


def counted(folder: Path, layers: int, experts: int) -> dict[str, int]:
    """The figures of a model with that many layers."""
    from engine import platform
    from engine.config.recipe import load_config
    from engine.model import experts as of_engine
    from engine.tools.acceptance.run_parts import random_group
    from engine.trainer.policy import Policy

    vars(of_engine)["product_for"] = lambda x, *sizes: vars(of_engine)["_by_torch"]
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=experts,
            num_experts_per_tok=8,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=1024,
            norm_topk_prob=True,
        )
    ).save_pretrained(folder)
    settings = {
        "model.path": folder,
        "algorithm.old_policy": "behavior",
        "algorithm.kl_coef": 0.0,
        "train.dtype": "bfloat16",
        "train.ratio_gap_limit": 0,
    }
    policy = Policy(
        load_config(None, [f"{key}={value}" for key, value in settings.items()]), platform.get_platform("cpu")
    )
    policy.start_step()
    with Operators() as batch:
        policy.accumulate([random_group(prompt=16, lengths=[9, 20, 3, 14], vocabulary=512, seed=0)])
    with Operators() as update:
        policy.reduce_gradients(4)
        policy.step_optimizer()
    return {
        "parameters": len(list(policy.models.policy.parameters())),
        "operators_per_micro_batch": sum(batch.started.values()),
        "stacked_bytes_per_micro_batch": batch.stacked,
        "operators_per_update": sum(update.started.values()),
    }


if __name__ == "__main__":
    main()
