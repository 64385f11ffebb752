"""Writes a recipe for `metronome init`: the keys that matter, each with what it means, in a layout that the dry run
accepts."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.recipe import HOME, find_file, load_config
from engine.config.reference import meaning_of
from engine.config.schema import SCHEMA
from engine.data.hub import is_hub_id
from engine.data.named_models import is_named_model
from engine.data.prepared import prepare_problems
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.run.files import write_atomically
from engine.run.memory import total_parameters
from engine.run.s3 import SCHEME as S3
from engine.tools.dry_run import describe_duration, plan_run
from engine.tools.dry_run.model_shape import shape_of
from tasks.stages.input_checks import check_reward

Keys = dict[str, Any]
"""Dotted key → value, in the order of the file."""
SIZES = (1, 2, 4, 8)
"""Numbers of devices that share a model, in the order in which they are tried."""
NODE = 8
"""Accelerators of a node, unless more are given."""
MOST = 16
"""Largest number of accelerators of a node (Atlas A3)."""
SMALLER: tuple[Keys, ...] = ({}, {"train.recompute": True, "train.distributed_optimizer": True})
"""Settings of the trainer that need less memory, tried in this order."""
MEMORY_GIB = {"npu": 60.9, "cuda": 79.1}
LEARNING_RATES = ((1e8, 3e-4), (1e9, 5e-5))
"""(parameters, learning rate) of models below so many parameters, as in the quickstart and smollm2.toml."""
PAPERS_RATE = 1e-6
HELD_OUT = 0.1
WIDTH = 110
"""Characters of a line of comment."""
PLAIN = "{problem}\n"
INSTRUCTIONS = {
    "math": "Please reason step by step, and put your final answer within \\boxed{}.",
    "exact": "Please reason step by step, and end with # and your final answer.",
}
"""Where a built-in reward looks for the answer. What a reward of one's own reads is not known."""


@dataclass(frozen=True)
class Wishes:
    """What the recipe is for."""

    model: str
    data: str
    heldout: str
    """Empty: a tenth of `data` is held out."""
    reward: str
    device: str
    """cpu, cuda or npu."""
    devices: int
    """Number of accelerators of one node; not read for a CPU."""
    max_new_tokens: int
    """0: by the device."""
    memory_gib: float
    """Memory of an accelerator. 0: by the device."""


def write_recipe(path: Path, wishes: Wishes) -> str:
    """Write the recipe and return a line on its time, "" if this machine does not tell it.

    Raises BadInput if the file is there, with the dry run's reasons if no layout on these devices is accepted, or if
    the reward, the problems or the tokenizer can't be read, as far as they are on this machine.
    """
    if path.exists():
        raise BadInput(f"{path}: it is there already; give another file, or delete it")
    keys, config = _accepted(wishes)
    check_reward(config)
    if not any(is_hub_id(place) or place.startswith(S3) for place in (wishes.data, wishes.heldout)):
        prepare_problems(config)
    if (model := find_file(wishes.model)).is_dir():
        Tokenizer(model, prompt_template=config.data.prompt_template)
    write_atomically(path, recipe_text(keys))
    told = wishes.device == "cpu"
    return f"\nOn this machine: {describe_duration(shape_of(wishes.model)[0], config)}" if told else ""


def recipe_text(keys: Keys) -> str:
    """The file: a line for the editor, and each key below the first sentence of its meaning."""
    lines = [
        f"#:schema {SCHEMA.as_uri()}",
        "# A recipe of Metronome, written by `metronome init`. Each key that is not here has its default; the schema",
        "# in the first line lists all keys with their meanings. Check the recipe with --set run.dry=true.",
    ]
    table = ""
    for key, value in keys.items():
        inside, _, name = key.rpartition(".")
        if inside != table:
            lines += ["", f"[{inside}]"]
            table = inside
        meaning = "vLLM's own argument." if key.startswith("rollout.vllm.") else meaning_of(key)
        lines += [*(f"# {line}" for line in textwrap.wrap(meaning, WIDTH)), f"{name} = {_toml(value)}"]
    return "\n".join(lines) + "\n"


def _accepted(wishes: Wishes) -> tuple[Keys, Config]:
    """The first layout that the dry run accepts. Raises BadInput with what it says about the last one."""
    refusal = BadInput(
        f"--devices {wishes.devices}: expected an even number up to {MOST} of one node, or one GPU, which is "
        f"shared; for several nodes begin with a recipe in {HOME / 'infra/recipes/papers'}"
    )
    for layout in _layouts(wishes):
        keys = _keys(wishes, layout)
        try:
            config = load_config(None, [f"{key}={_toml(value)}" for key, value in keys.items()])
            plan_run(config)
        except BadInput as error:
            refusal = error
            continue
        return keys, config
    raise refusal


def _layouts(wishes: Wishes) -> Iterator[Keys]:
    """Half of the devices for training and half for rollouts: first with few devices for each copy of the model, and
    without the settings that save memory. One GPU is shared."""
    count = wishes.devices
    if wishes.device == "cpu":
        yield {"rollout.engine": "embedded"}
        return
    node: Keys = {"platform.device": wishes.device, "platform.devices_per_node": max(NODE, count)}
    node["platform.memory_gib"] = wishes.memory_gib or MEMORY_GIB[wishes.device]
    if count == 1 and wishes.device == "cuda":
        shared: Keys = {"rollout.share_devices": True, "rollout.vllm.gpu_memory_utilization": 0.4}
        shared |= {"rollout.devices": [0], "weights.transport": "file"}
        yield from ({"rollout.engine": "vllm", **shared, **smaller, **node} for smaller in SMALLER)
    half = count // 2
    sizes = [one for one in SIZES if count % 2 == 0 and count <= MOST and half and half % one == 0]
    for smaller, size in itertools.product(SMALLER, sizes):
        rollout: Keys = {"rollout.engine": "vllm", "rollout.instances": half // size, "rollout.tensor": size}
        rollout["rollout.devices"] = list(range(half, count))
        layout = {"parallel.tensor": size, "parallel.data": half // size, "parallel.sequence": size > 1}
        yield {**rollout, **smaller, **layout, **node}


def _keys(wishes: Wishes, layout: Keys) -> Keys:
    """All keys of the recipe, table by table."""
    shape, _ = shape_of(wishes.model)
    parameters = total_parameters(shape)
    on_cpu = wishes.device == "cpu"
    longest = wishes.max_new_tokens or (256 if on_cpu else 2048)
    context = min(shape.context, longest + max(longest, 256))
    dtype = "float32" if on_cpu else "bfloat16"
    held = {"data.heldout": wishes.heldout} if wishes.heldout else {"data.heldout_fraction": HELD_OUT}
    asked = {"data.instruction": INSTRUCTIONS[wishes.reward]} if wishes.reward in INSTRUCTIONS else {}
    chat = {"data.prompt_template": "chat", **asked}
    prompt = chat if _has_chat_template(wishes.model) else {"data.prompt_template": PLAIN}
    exact = {} if on_cpu else {"train.dtype": dtype, "train.ratio_gap_limit": 0}
    return {
        **{"model.path": wishes.model, "model.dtype": dtype, "data.train": wishes.data},
        **{**held, **prompt, "reward.function": wishes.reward},
        **{key: value for key, value in layout.items() if key.startswith("rollout.") and "vllm." not in key},
        **{"rollout.group_size": 8, "rollout.max_context": context, "rollout.max_new_tokens": longest},
        **{key: value for key, value in layout.items() if "vllm." in key},
        **{"train.mode": "periodic", "train.steps": 50, "train.prompts_per_step": 8 if on_cpu else 64},
        "train.learning_rate": next((rate for size, rate in LEARNING_RATES if parameters < size), PAPERS_RATE),
        **{"train.micro_batch_tokens": max(context, 1024), **exact},
        **{key: value for key, value in layout.items() if key.startswith("train.")},
        **{key: value for key, value in layout.items() if not key.startswith(("rollout.", "train."))},
        **{"checkpoint.every": 10, "evaluate.max_new_tokens": longest},
    }


def _has_chat_template(model: str) -> bool:
    """Whether the model's folder has a chat template. A model of the hub or S3, or one that is elsewhere,
    counts as such."""
    folder = find_file(model)
    if is_named_model(model) or not folder.is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and "chat_template" in json.loads(settings.read_text())
    )


def _toml(value: Any) -> str:  # noqa: ANN401
    """A text, a number, true or false, or a list of these as TOML, which writes them as JSON does."""
    return json.dumps(value, ensure_ascii=False)
