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
from engine.run.limits import check_limits, check_memory, stored_parameters
from engine.run.vllm_command import check_for_cpu, device_of, visible_devices, vllm_interpreter
from engine.wire.access_token import check_address, is_loopback
from engine.wire.address import AUTO, split_address

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
    shape = check_rollouts(config)
    check_layouts(config, shape)
    check_limits(config, stored_parameters(find_file(config.model.path)))
    check_memory(config, shape)
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


def unreached(config: Config) -> Iterator[str]:
    """Yield why instances on other nodes, which the config needs, could not reach the run's server. Those of a Ray
    cluster get an address when they are placed."""
    joining = config.dry_run.joining
    listen = config.rollout.listen
    awaited = joining or (config.places_on_devices and not config.rollout.instances)
    if not awaited or config.cluster.engine == "ray" or listen.startswith(f"{AUTO}:"):
        return
    host, _ = split_address(listen, "rollout.listen")
    check_address(host, "", "rollout.listen")
    if is_loopback(host):
        which = f"dry_run.joining = {joining}" if joining else "rollout.instances = 0"
        yield (
            f"{which}: instances join from other nodes, and only this machine reaches rollout.listen = {listen!r}: set "
            'rollout.listen = "auto:7000" (this machine\'s own address), and METRONOME_TOKEN on all nodes'
        )


def check_instances(config: Config) -> None:
    """Raise BadInput unless other nodes' instances can reach the run (`unreached`), and this machine has what its own
    instances need: `check_vllm`, and devices that no trainer rank uses (on a CPU, the cores of `rollout.devices`)."""
    for reason in unreached(config):
        raise BadInput(reason)
    if not config.rollout.instances or (device := check_vllm(config)) == "cpu":
        return
    visible = visible_devices(device)
    if all(map(str.isdigit, visible)) and (wrong := list(find_overlaps(config, list(map(int, visible))))):  # not UUIDs
        raise BadInput("; ".join(wrong))


def check_vllm(config: Config) -> str:
    """The kind of device of this machine's instances; "cpu" with the embedded engine. Raises BadInput unless vLLM's
    environment is there, where instances need it."""
    if config.rollout.engine != "vllm":
        return "cpu"
    device = device_of(vllm_interpreter(), config.platform.device)
    if device == "cpu":
        check_for_cpu(config)
    return device
