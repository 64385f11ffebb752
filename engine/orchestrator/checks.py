"""Checks of a run's configuration against its base model and this machine, before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from engine.config import Config
from engine.config.placing import find_overlaps
from engine.config.recipe import find_file
from engine.config.stages import REFERENCE_STAGE
from engine.errors import BadInput
from engine.model.shape import ModelShape, check_layout, read_shape
from engine.run.limits import check_limits, stored_parameters
from engine.run.vllm_command import check_for_cpu, device_of, visible_devices, vllm_interpreter

EMBEDDED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that the embedded engine runs: a copy of `engine.instance.embedded.rollout_model.SUPPORTED`, which
takes seconds to import."""


def unfit_rollouts(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield each reason why instances can't sample from a model of this shape."""
    rollout = config.rollout
    if rollout.engine == "embedded" and shape.architecture not in EMBEDDED:
        yield f'rollout.engine = "embedded" does not run {shape.architecture}, only {", ".join(EMBEDDED)}'
    if rollout.engine == "vllm" and shape.heads % rollout.tensor:
        yield f"rollout.tensor = {rollout.tensor} does not divide the model's {shape.heads} attention heads"
    if config.algorithm.routing_replay and not shape.experts:
        yield "algorithm.routing_replay is for mixtures of experts, and this model is dense: set it to false"
    for key, context in (
        ("rollout.max_context", rollout.max_context),
        ("evaluate.max_context", config.evaluate.max_context),
    ):
        if context > shape.context:
            yield f"{key} = {context:,} is more than the {shape.context:,} positions that the model was made for"


def check_rollouts(config: Config) -> ModelShape:
    """Return the shape of the model in `model.path`, a Hugging Face folder.

    Raises BadInput unless instances can sample from it.
    """
    shape = read_shape(find_file(config.model.path))
    for reason in unfit_rollouts(config, shape):
        raise BadInput(f"model.path {config.model.path}: {reason}")
    return shape


def check_training(config: Config) -> None:
    """Raise BadInput unless instances can sample from the model, the trainer can lay it out as `parallel` says, this
    machine's limits suffice, the column store is installed, and the user's own algorithm functions work."""
    check_layouts(config, check_rollouts(config))
    check_limits(config, stored_parameters(find_file(config.model.path)))
    check_store(config)
    algorithm = config.algorithm
    if any(":" in spec for spec in (algorithm.advantage, algorithm.loss, algorithm.gradient_control)):
        from engine.run.user_algorithms import try_algorithms  # here, because importing torch takes seconds

        try_algorithms(algorithm.advantage, algorithm.loss, algorithm.gradient_control)


def check_layouts(config: Config, shape: ModelShape) -> None:
    """Raise BadInput unless the trainer, and the stages whose ranks are ours, can lay out the model as the config
    says."""
    check_layout(shape, config.parallel)
    layers = shape.layers // config.parallel.pipeline
    recompute = config.train.recompute
    if not isinstance(recompute, str) and recompute > layers:
        raise BadInput(
            f"train.recompute = {recompute}: a pipeline stage has {layers} layers; true recomputes all of them"
        )
    if config.reference_stage is not None:
        check_layout(shape, config.stage_layout(REFERENCE_STAGE), f"stages.{REFERENCE_STAGE}")


def check_store(config: Config) -> None:
    """Raise BadInput unless the library that `queue.store` needs is installed."""
    if config.queue.store == "transferqueue" and find_spec("transfer_queue") is None:
        raise BadInput(
            f'queue.store = "transferqueue" needs the library: pip install "metronome[transferqueue]" into {sys.prefix}'
        )


def check_instances(config: Config) -> None:
    """Raise BadInput unless this machine has what vLLM instances need: vLLM's environment, and devices that no trainer
    rank uses (on a CPU, the cores of `rollout.devices`)."""
    if config.rollout.engine != "vllm" or not config.rollout.instances:
        return
    device = device_of(vllm_interpreter(), config.platform.device)
    if device == "cpu":
        check_for_cpu(config)
        return
    visible = visible_devices(device)
    if all(map(str.isdigit, visible)) and (wrong := list(find_overlaps(config, list(map(int, visible))))):  # not UUIDs
        raise BadInput("; ".join(wrong))
