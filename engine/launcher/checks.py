"""Checks of a run's configuration against its base model and this machine, before any process starts."""

from __future__ import annotations

from pathlib import Path

from engine.config import Config
from engine.config.placing import overlaps
from engine.errors import BadInput
from engine.model.layout_rules import check_layout
from engine.model.shape import ModelShape, read_shape
from engine.run.limits import check_limits, stored_parameters
from engine.run.vllm_command import check_cores, device_of, interpreter, visible_devices

EMBEDDED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that the embedded engine runs: those of `engine.instance.embedded.rollout_model.SUPPORTED`, which takes
seconds to import."""


def check_rollouts(config: Config) -> ModelShape:
    """Return the shape of the model in `model.path`, a Hugging Face folder.

    Raises BadInput unless instances can sample from it.
    """
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
    """Raise BadInput unless instances can sample from the model, the trainer can lay it out as `parallel` says, this
    machine's limits suffice, and the user's own algorithm functions work."""
    check_layout(check_rollouts(config), config.parallel)
    check_limits(config, stored_parameters(Path(config.model.path).expanduser()))
    algorithm = config.algorithm
    if any(":" in spec for spec in (algorithm.advantage, algorithm.loss, algorithm.gradient_control)):
        from engine.run.user_algorithms import try_algorithms  # here, because importing torch takes seconds

        try_algorithms(algorithm.advantage, algorithm.loss, algorithm.gradient_control)


def check_instances(config: Config) -> None:
    """Raise BadInput unless this machine has what vLLM instances need: vLLM's environment, and devices that no trainer
    rank uses (on a CPU the cores of `rollout.devices`)."""
    if config.rollout.engine != "vllm" or not config.rollout.instances:
        return
    device = device_of(interpreter(), config.platform.device)
    if device == "cpu":
        check_cores(config)
        return
    visible = visible_devices(device)
    if all(map(str.isdigit, visible)) and (wrong := list(overlaps(config, list(map(int, visible))))):  # not UUIDs
        raise BadInput("; ".join(wrong))
