"""Runs for the parts: a random model, settings that fit the machine, and the orchestrator in a separate process."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from engine.config import Config, Model
from engine.config.recipe import HOME, find_file, load_config
from engine.config.tree import usable_cores
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.platform import Platform
from engine.run.commands import orchestrator_command
from engine.run.files import read_lines
from engine.run.folder import RunFolder, dump_config
from engine.run.process import Child
from engine.run.vllm_command import device_of, visible_devices, vllm_interpreter
from engine.tools.acceptance.device_parts import complete_platform, device_count
from engine.tools.acceptance.notes import PartTask
from engine.types import Group, JsonObject, Prompt, Response, Score


def random_group(prompt: int, lengths: Sequence[int], vocabulary: int, seed: int = 0, step: int = 0) -> Group:
    """A prompt of `prompt` random tokens with responses of these lengths and random rewards. Its index is the seed."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    responses = tuple(
        Response(
            token_ids=tokens(length),
            logprobs=(-1.0,) * length,
            versions=((0, step),),
            loss_mask=(True,) * length,
            finish_reason="length",
            text="",
            seed=0,
            instance="",
        )
        for length in lengths
    )
    return Group(
        step=step,
        index=seed,
        prompt=Prompt(str(seed), "", "", tokens(prompt)),
        responses=responses,
        scores=tuple(Score(draw.random()) for _ in lengths),
    )


SMALL: dict[str, Any] = {}
"""The quickstart's sizes: 1 million parameters."""
MEDIUM: dict[str, Any] = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536, "initializer_range": 3 / 512**0.5,
}  # fmt: skip
"""13 million parameters, for a CPU. Its logits have a standard deviation of 3, like those of trained models. With flat
logits, two engines in bf16 would agree far better than they do on a trained model."""
LARGE: dict[str, Any] = {
    "num_hidden_layers": 6, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 6144, "initializer_range": 3 / 2048**0.5,
}  # fmt: skip
"""Six layers of Qwen3-1.7B's sizes: 303 million parameters, for a device. Its logits are like those of `MEDIUM`."""
STOP_S = 9.0
"""Seconds that the orchestrator has to end its children. Then it is killed, and lifelines end the children."""
LOOK_S = 0.1


@dataclass(frozen=True)
class RolloutChoice:
    """The engine that samples on this machine, and the transport by which it gets the weights."""

    engine: str
    transport: str
    devices: tuple[int, ...]
    """Value of rollout.devices."""
    remark: str
    """Why the engine is not vLLM, or the transport not the platform's own; "" if both are."""


def rollout_choice(machine: Platform, settings: tuple[str, ...], training: bool) -> RolloutChoice:
    """vLLM, if its environment exists and, for a training, there is a second device; otherwise the embedded engine.

    A user's rollout.engine takes precedence.
    """
    why = _no_vllm(machine) or (_no_second_device(machine) if training else "")
    wanted = [one.partition("=")[2].strip(' "') for one in settings if one.startswith("rollout.engine=")]
    engine = wanted[-1] if wanted else "embedded" if why else "vllm"
    if machine.name == "cpu":
        return RolloutChoice(engine, "gloo", tuple(sorted(usable_cores())[1:2]) if training else (), why)
    if engine == "embedded":
        remark = f"the embedded engine samples on the CPU, so {machine.backend} is not tested: {why}"
        return RolloutChoice(engine, "gloo", (), remark)
    visible = [int(one) for one in visible_devices(machine.name) if one.isdigit()] or list(range(device_count(machine)))
    return RolloutChoice(engine, machine.backend, (visible[1 if training else 0],), "")


def embedded_on_cpu(machine: Platform) -> RolloutChoice:
    """The embedded engine, on its own core if there are two."""
    return RolloutChoice("embedded", "gloo", tuple(sorted(usable_cores())[1:2]) if machine.name == "cpu" else (), "")


def _no_second_device(machine: Platform) -> str:
    alone = machine.name != "cpu" and device_count(machine) < 2
    return "vLLM needs a second device, but this process sees only the trainer's" if alone else ""


def _no_vllm(machine: Platform) -> str:
    """Why vLLM cannot sample on this platform; "" if it can."""
    try:
        device = device_of(vllm_interpreter(), machine.name)
    except BadInput as error:
        return str(error)
    if device != machine.name:
        return f"the environment with vLLM is for {device}: run `make vllm DEVICE={machine.name}`"
    return ""


def make_model(folder: Path, sizes: Mapping[str, Any]) -> Path:
    """The quickstart's model with random weights and these values of its config.json, as a Hugging Face folder in fp32.
    An existing one is kept."""
    if not (folder / "complete").exists():
        shutil.copytree(find_file(Model().path), folder, dirs_exist_ok=True)
        values = json.loads((folder / "config.json").read_text())
        del values["layer_types"]  # it has an entry for each layer
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**{**values, **sizes}))
        model.generation_config = GenerationConfig.from_pretrained(folder)
        model.save_pretrained(folder)
        (folder / "complete").touch()
    return folder


def configuration(task: PartTask, machine: Platform, chosen: RolloutChoice, given: Mapping[str, Any]) -> Config:
    """The configuration of a run in the task's folder: what the machine needs, overridden by what the part gives,
    overridden by what the user gives."""
    on_device = machine.name != "cpu"
    cores = sorted(usable_cores())
    # one dtype for both sides, because the comparison after a sync is strict if the instances use fp32
    dtype = "bfloat16" if on_device and chosen.engine == "vllm" else "float32"
    settings: dict[str, Any] = {
        "platform.device": machine.name,
        "data.train": str(HOME / "data/addition_train.jsonl"),
        "data.heldout": str(HOME / "data/addition_heldout.jsonl"),
        "reward.function": "engine.tools.acceptance.reward:even",
        "rollout.engine": chosen.engine,
        "rollout.devices": list(chosen.devices),
        "weights.transport": chosen.transport,
        "train.devices": [] if on_device or len(cores) < 2 else cores[:1],
        "train.dtype": dtype,
        "model.dtype": dtype,
        "checkpoint.every": 0,
        **({"train.ratio_gap_limit": 0} if on_device else {}),
        **given,
    }
    ours = (f"{key}={_toml(value)}" for key, value in settings.items())
    return load_config(None, [*ours, *task.settings, f"run.output={task.folder}"])


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def train(task: PartTask, config: Config, timeout_s: float, replay: Path | None = None) -> list[JsonObject]:
    """Run the orchestrator to its end. Return the lines of steps.jsonl.

    Raises DeadlineError, and MetronomeError with the run's own reason.
    """
    file = task.folder / f"{config.run.name}.toml"
    dump_config(config, file)
    log = task.folder / f"{config.run.name}.log"
    folder = RunFolder(config.folder)
    orchestrator = Child("orchestrator", orchestrator_command(file, False, replay), log)
    task.notes.doing(f"the run {config.run.name} of {config.train.steps} steps (its logs: {folder.logs})")
    try:
        _wait(orchestrator, folder, config, timeout_s)
    finally:
        orchestrator.stop(STOP_S)
    return list(read_lines(folder.steps))


def _wait(orchestrator: Child, folder: RunFolder, config: Config, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while orchestrator.alive:
        if time.monotonic() > deadline:
            done = len(list(read_lines(folder.steps)))
            raise DeadlineError(
                f"the run {config.run.name} has trained {done} of {config.train.steps} steps in {timeout_s:.0f} s; its "
                f"orchestrator {orchestrator.how_it_ended()}"
            )
        time.sleep(LOOK_S)
    if orchestrator.process.returncode:
        told = json.loads(folder.failure.read_text())["message"] if folder.failure.exists() else ""
        raise MetronomeError(
            f"the run {config.run.name} failed: {told or f'the orchestrator {orchestrator.how_it_ended()}'}"
        )


def parameter_bytes(model: Path, dtype: str) -> int:
    """Bytes of the model's weights in this dtype. The files of the acceptance models are in fp32."""
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return stored if dtype == "float32" else stored // 2


def machine_of(task: PartTask) -> Platform:
    """The platform of the task, which lacks nothing. Raises BadInput otherwise."""
    return complete_platform(task.platform)
