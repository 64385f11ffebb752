"""The parts that need an instance or a whole run, with a random model and settings that fit the machine."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import statistics
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from engine.config import Config, Model
from engine.config.recipe import HOME, find_file, load_config
from engine.config.tree import usable_cores
from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.model.flops import flop_utilisation, micro_step, peak_of
from engine.model.shape import read_shape
from engine.platform import PLATFORMS, Platform
from engine.run.commands import instance_command, orchestrator_command
from engine.run.files import read_lines
from engine.run.folder import RunFolder, dump_config
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child
from engine.run.vllm_command import device_of, visible_devices, vllm_interpreter
from engine.tools.acceptance.broadcast import broadcasting
from engine.tools.acceptance.device_parts import MEETING_S, complete_platform, device_count
from engine.tools.acceptance.notes import SLOWER_START_S, PartFailed, PartSkipped, PartTask
from engine.types import Group, JsonObject, Prompt, Response, Score
from engine.wire.access_token import VARIABLE, authorization_headers, own_token
from engine.wire.address import http_url
from engine.wire.columns import pack_group
from engine.wire.messages import Window
from engine.wire.record import RecordWriter


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
    why = _no_vllm(machine)
    if not why and training and machine.name != "cpu" and device_count(machine) < 2:
        why = "vLLM needs a second device, but this process sees only the trainer's"
    wanted = [one.partition("=")[2].strip(' "') for one in settings if one.startswith("rollout.engine=")]
    engine = wanted[-1] if wanted else "embedded" if why else "vllm"
    if machine.name == "cpu":
        return RolloutChoice(engine, "gloo", tuple(sorted(usable_cores())[1:2]) if training else (), why)
    if engine == "embedded":
        remark = f"the embedded engine samples on the CPU, so {machine.backend} is not tested: {why}"
        return RolloutChoice(engine, "gloo", (), remark)
    visible = [int(one) for one in visible_devices(machine.name) if one.isdigit()] or list(range(device_count(machine)))
    return RolloutChoice(engine, machine.backend, (visible[1 if training else 0],), "")


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
    ours = (
        f"{key}={json.dumps(value) if isinstance(value, bool | list) else value}" for key, value in settings.items()
    )
    return load_config(None, [*ours, *task.settings, f"run.output={task.folder}"])


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


# the parts --------------------------------------------------------------------------------------

PROMPT = list(b"12+30=")
"""Token ids. The model's tokenizer works on bytes."""
TOKENS = 64
START_S = 200.0
"""Time limit in seconds of the instance's start, without SLOWER_START_S. vLLM loads, compiles and captures graphs."""
REPLY_S = 60.0


def completion(task: PartTask) -> None:
    """Start an instance, and have it sample twice. Raises PartSkipped without vLLM on a device, and PartFailed for an
    invalid reply."""
    machine = complete_platform(task.platform)
    chosen = rollout_choice(machine, task.settings, training=False)
    if chosen.engine == "embedded" and machine.name != "cpu":
        raise PartSkipped(chosen.remark, f"make vllm DEVICE={machine.name}")
    if chosen.remark:
        task.notes.say(f"the embedded engine answers: {chosen.remark}")
    model = make_model(task.folder / "model", MEDIUM if machine.name == "cpu" else LARGE)
    given = {
        "run.name": "completion", "model.path": model, "rollout.max_context": 512, "rollout.max_new_tokens": TOKENS,
        "train.devices": [], "rollout.concurrency": 1,
    }  # fmt: skip
    config = configuration(task, machine, chosen, given)
    token = own_token()
    instance = _start(config, model, task.folder / "completion", token)
    try:
        task.notes.doing(f"the start of {instance.name} ({config.rollout.engine}), which writes {instance.child.log}")
        began = time.monotonic()
        host, port = asyncio.run(instance.serves(START_S + SLOWER_START_S.get(machine.name, 0.0)))
        started = time.monotonic() - began
        task.notes.doing(f"a completion of {instance.name}, which writes {instance.child.log}")
        _checked(_ask(http_url(host, port), token, seed=0))  # the first request compiles
        began = time.monotonic()
        tokens = _checked(_ask(http_url(host, port), token, seed=1))
        rate = tokens / (time.monotonic() - began)
    finally:
        instance.child.stop()
    task.notes.say(
        f"{config.rollout.engine} serves after {started:.1f} s, and answers one request with {tokens} tokens at "
        f"{rate:.0f} tokens/s"
    )
    task.notes.figures(engine=config.rollout.engine, start_s=started, tokens=tokens, tokens_per_s=rate)


def _start(config: Config, model: Path, folder: Path, token: str) -> InstanceProcess:
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / "address.json"
    command, env = instance_command(config=config, model=model, name="instance-0", number=0, port_file=port_file)
    child = Child("instance-0", command, folder / "instance-0.log", env | {VARIABLE: token})
    return InstanceProcess(0, child, port_file)


def _ask(url: str, token: str, seed: int) -> JsonObject:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **authorization_headers(token)}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        answer: JsonObject = json.loads(reply.read())
    return answer


def _checked(reply: JsonObject) -> int:
    """The number of sampled tokens. Raises PartFailed unless each has a valid log-probability."""
    choice = reply["choices"][0]
    tokens = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if (
        len(tokens) != TOKENS
        or len(logprobs) != TOKENS
        or not all(math.isfinite(one) and one <= 1e-4 for one in logprobs)
    ):
        raise PartFailed(
            f"the reply has {len(tokens)} tokens of {TOKENS}, and the log-probabilities {logprobs[:8]} ..."
        )
    return len(tokens)


SAMPLED = {
    "rollout.max_context": 512,
    "rollout.group_size": 4,
    "rollout.concurrency": 2,
    "train.learning_rate": 1e-4,
    "algorithm.old_policy": "behavior",
}
"""Settings of runs that sample responses."""
WARM_UP = 1
"""Number of first steps that are not counted, because they compile, connect and test the connections."""


def weight_sync(task: PartTask) -> None:
    """Time the weight syncs of a short run, and a bare broadcast of the same bytes to compare with."""
    machine = complete_platform(task.platform)
    chosen = rollout_choice(machine, task.settings, training=True)
    model = make_model(task.folder / "model", MEDIUM if machine.name == "cpu" else LARGE)
    given = {"run.name": "weight-sync", "model.path": model, "train.steps": 4, "train.prompts_per_step": 2}
    config = configuration(task, machine, chosen, {**SAMPLED, **given, "rollout.max_new_tokens": 16})
    steps = train(task, config, timeout_s=200.0 + SLOWER_START_S.get(machine.name, 0.0))
    sync_s = statistics.median(step["sync_s"] for step in steps[WARM_UP:])
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))  # in fp32
    total = stored if config.model.dtype == "float32" else stored // 2
    bucket = config.weights.bucket_bytes
    sizes = [bucket] * (total // bucket) + [total % bucket]
    between = machine if config.weights.transport == machine.backend else PLATFORMS["cpu"]
    backend = between.backend
    task.notes.doing(f"a bare broadcast of the same bytes over {backend}")
    with broadcasting(
        machine=between.name,
        sizes=[size for size in sizes if size],
        receivers=1,
        logs=task.folder / "bare",
        timeout_s=MEETING_S,
    ) as pair:
        bare_s = statistics.median(pair.again() for _ in range(3))
    if chosen.remark:
        task.notes.say(chosen.remark)
    task.notes.say(
        f"{config.weights.transport}, trainer → {config.rollout.engine}: {total / 1e6:.0f} MB in {sync_s:.3f} s "
        f"({total / sync_s / 1e9:.2f} GB/s); a bare broadcast over {backend} takes {bare_s:.3f} s "
        f"({total / bare_s / 1e9:.2f} GB/s), ratio {sync_s / bare_s:.1f}"
    )
    gap = max(step["max_ratio_gap"] for step in steps)
    task.notes.say(f"largest |trainer's probability / instance's - 1| of a sampled token: {gap:.1e}")
    task.notes.figures(
        transport=config.weights.transport,
        engine=config.rollout.engine,
        bytes=total,
        sync_s=sync_s,
        bare_s=bare_s,
        ratio=sync_s / bare_s,
        max_ratio_gap=gap,
    )


def training_step(task: PartTask) -> None:
    """Time training steps on random groups, which are replayed so that no instance takes part."""
    machine = complete_platform(task.platform)
    on_device = machine.name != "cpu"
    model = make_model(task.folder / "model", LARGE if on_device else MEDIUM)
    prompt, response, group, groups = (512, 512, 8, 4) if on_device else (64, 64, 4, 2)
    given = {
        "run.name": "training-step", "model.path": model, "train.steps": 4, "train.prompts_per_step": groups,
        "train.micro_batch_tokens": prompt + group * response, "rollout.group_size": group,
        "rollout.max_new_tokens": response, "rollout.max_context": prompt + response, "train.ratio_gap_limit": 0,
        "algorithm.old_policy": "behavior", "rollout.engine": "embedded", "model.dtype": "float32",
        "weights.transport": "file", "rollout.devices": [], "train.dtype": "bfloat16" if on_device else "float32",
    }  # fmt: skip
    config = configuration(task, machine, rollout_choice(machine, (), training=True), given)
    record = _record(task.folder / "training-step.msgpack", config, prompt, response)
    steps = train(task, config, timeout_s=150.0, replay=record)[WARM_UP:]
    seconds = statistics.median(step["train_s"] + step["update_s"] for step in steps)
    shape = read_shape(model)
    shared = config.attention.shared_prompt
    operations = groups * micro_step(sizes=shape, prompt=prompt, response=response, group=group, shared=shared)
    tokens = groups * group * (prompt + response)
    memory = max(max(step["memory_peak_gib"]) for step in steps)
    name = machine.device_name(0)
    task.notes.say(
        f"{shape.layers} layers of {shape.hidden}, {config.train.dtype}: {groups} groups of {group} × {response} "
        f"tokens after prompts of {prompt} in {seconds:.3f} s (forward, backward, optimizer), {tokens / seconds:,.0f} "
        f"tokens/s, {operations / seconds / 1e12:.2f} TFLOP/s, {memory:.1f} GiB at most"
    )
    task.notes.say(_mfu(machine, name, operations, seconds))
    task.notes.figures(
        tokens_per_s=tokens / seconds,
        seconds=seconds,
        operations=operations,
        memory_peak_gib=memory,
        mfu=flop_utilisation(operations, seconds, name),
        device=name,
    )


def _mfu(machine: Platform, name: str, operations: float, seconds: float) -> str:
    peak = peak_of(name)
    if peak is not None:
        return f"MFU {operations / seconds / peak:.1%} of {peak / 1e12:.0f} TFLOP/s ({name}, dense bf16, published)"
    if machine.name == "cpu":
        return "no MFU: a CPU has no published peak"
    return f'no MFU: the peak of "{name}" is not known (PEAKS in engine/model/flops.py)'


def _record(file: Path, config: Config, prompt: int, response: int) -> Path:
    """A record of random groups for all steps of a run."""
    writer = RecordWriter(file, config, 0)
    for step in range(config.train.steps):
        lengths = [response] * config.rollout.group_size
        groups = [
            random_group(prompt=prompt, lengths=lengths, vocabulary=256, seed=index, step=step)
            for index in range(config.train.prompts_per_step)
        ]
        writer.add_window(0, Window(step, tuple(map(pack_group, groups))))
    writer.flush()
    return file


def sync_against_periodic(task: PartTask) -> None:
    """Train the same few steps in both modes. Raises PartFailed if a step is not on-policy, or if the weights differ
    where they must not."""
    machine = complete_platform(task.platform)
    on_cpu = machine.name == "cpu"
    settings = ("rollout.engine=embedded",) if on_cpu else task.settings
    chosen = rollout_choice(machine, settings, training=True)
    small = chosen.engine == "embedded"
    groups = 16 if small else 32
    given: dict[str, Any] = {
        "model.path": make_model(task.folder / ("model-small" if small else "model"), SMALL if small else LARGE),
        "train.steps": 4, "train.prompts_per_step": groups, "train.micro_batch_tokens": 512 if small else 8192,
        "rollout.max_new_tokens": 32 if small else 256,
        **({"rollout.deterministic": True, "train.consume": "prompt_order"} if small else {}),
    }  # fmt: skip
    steps: dict[str, list[JsonObject]] = {}
    configs: dict[str, Config] = {}
    for mode in ("sync", "periodic"):
        configs[mode] = configuration(task, machine, chosen, {**SAMPLED, **given, "run.name": mode, "train.mode": mode})
        steps[mode] = train(task, configs[mode], timeout_s=130.0 + SLOWER_START_S.get(machine.name, 0.0))
        _check_on_policy(mode, steps[mode])
    seconds = {mode: statistics.median(step["step_s"] for step in lines[WARM_UP:]) for mode, lines in steps.items()}
    rollout = statistics.median(step["rollout_s"] for step in steps["sync"][WARM_UP:])
    trained = statistics.median(step["train_s"] for step in steps["sync"][WARM_UP:])
    ratio = seconds["sync"] / seconds["periodic"]
    task.notes.say(
        f"{chosen.engine}, {groups} groups a step: sync {seconds['sync']:.2f} s, periodic {seconds['periodic']:.2f} s "
        f"a step, ratio {ratio:.2f}; a sync step has {rollout:.2f} s of rollouts and {trained:.2f} s of training"
    )
    task.notes.say("every step of both runs trained on responses of its own weights only")
    task.notes.figures(
        sync_s=seconds["sync"],
        periodic_s=seconds["periodic"],
        ratio=ratio,
        rollout_s=rollout,
        train_s=trained,
    )
    _compare_weights(task, configs, required=on_cpu)


def _check_on_policy(mode: str, steps: Sequence[JsonObject]) -> None:
    if stale := [step["step"] for step in steps if step["versions_seen"] != [step["step"]]]:
        raise PartFailed(f"mode {mode}: the steps {stale} trained on responses of other weights than their own")


def _compare_weights(task: PartTask, configs: dict[str, Config], required: bool) -> None:
    """Compare the trained weights of both modes, bit for bit. Raises PartFailed if they differ where they must be
    equal."""
    if not all(one.rollout.deterministic and one.train.consume == "prompt_order" for one in configs.values()):
        task.notes.say(
            "the trained weights are not compared: that needs --set rollout.deterministic=true "
            "--set train.consume=prompt_order, on a device --set train.deterministic=true, and with vLLM on CUDA "
            "--set weights.transport=gloo"
        )
        return
    ours, theirs = (load_file(configs[mode].folder / "policy" / "model.safetensors") for mode in ("sync", "periodic"))
    differ = [name for name, tensor in ours.items() if not tensor.equal(theirs[name])]
    task.notes.figures(weights_equal=not differ)
    found = f"the weights that sync and periodic trained differ in {len(differ)} of {len(ours)} tensors"
    if differ and required:
        raise PartFailed(found)
    on_device = "on a device a backward pass may add up in another order"
    task.notes.say(f"{found}: {on_device}" if differ else "both modes trained the same weights, bit for bit")
