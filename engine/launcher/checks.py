"""A run's configuration against its base model: what can't work is refused before any process starts."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.config.placing import overlaps
from engine.errors import BadInput
from engine.model.layout_rules import check_layout
from engine.model.shape import ModelShape, read_shape
from engine.run.vllm_command import check_cores, device_of, interpreter, visible_devices

EMBEDDED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What the embedded engine can run: `engine.instance.embedded.rollout_model.SUPPORTED`,
which takes seconds to import, by architecture."""


def check_rollouts(config: Config) -> ModelShape:
    """The shape of the model in `model.path`, a Hugging Face folder.
    Raises BadInput unless instances can sample from it."""
    folder = Path(config.model.path).expanduser()
    shape = read_shape(folder)
    if config.rollout.engine == "embedded" and shape.architecture not in EMBEDDED:
        raise BadInput(
            f'model.path {folder}: rollout.engine = "embedded" does not run {shape.architecture}, '
            f"only {', '.join(EMBEDDED)}"
        )
    for table in ("rollout", "evaluate"):
        if (context := getattr(config, table).max_context) > shape.context:
            raise BadInput(
                f"{table}.max_context = {context} is more than the {shape.context} positions that the model in "
                f"{config.model.path} was made for"
            )
    return shape


def check_training(config: Config) -> None:
    """Raise BadInput unless the model can be sampled from, trained in the layout of `parallel`,
    and a user's functions work."""
    check_layout(check_rollouts(config), config.parallel)
    algorithm = config.algorithm
    if any(":" in spec for spec in (algorithm.advantage, algorithm.loss, algorithm.gradient_control)):
        from engine.run.user_algorithms import try_algorithms  # torch takes seconds

        try_algorithms(algorithm.advantage, algorithm.loss, algorithm.gradient_control)


def check_instances(config: Config) -> None:
    """Raise BadInput unless this machine has what the run's instances need:
    vLLM's environment, devices without trainer ranks."""
    if config.rollout.engine != "vllm" or not config.rollout.instances:
        return
    device = device_of(interpreter(), config.platform.device)
    if device == "cpu":
        check_cores(config)
        return
    visible = visible_devices(device)
    if all(map(str.isdigit, visible)) and (wrong := list(overlaps(config, list(map(int, visible))))):  # not UUIDs
        raise BadInput("; ".join(wrong))
