"""Whole GRPO steps of a named model on one device, in nine minutes: `python benchmarks/one_device.py --device cuda`

Parts, one after the other, each with a deadline; one that fails is named, and the next begins:

* doctor: `metronome doctor --device`, its parts devices and kernels.
* run: ten whole steps of a GSM8K-shaped run (periodic, 32 prompts × 8 responses a step) of a random model of
  Qwen3-0.6B's sizes. vLLM, with graphs, shares the device with the trainer; without vLLM's environment the embedded
  engine samples on the CPU, and the figures say so. A random model seldom ends a response, so all have about
  `--response` tokens.
* micro_step: `device.py`, forward, loss and backward alone.
* embedded: one step of the same run with the embedded engine (on the CPU).

The run's micro-batch is the largest for which the dry run's sum of memory fits the device. `step_mfu` counts the
operations of the forward and backward passes over the whole step, with rollouts, sync and update in it; `mfu` over
their own seconds. Prompts are bytes of word problems: 100 to 200 tokens, as GSM8K's have.

With `--device cpu` a tiny model makes the same parts in a few minutes. `--out` is a file for the figures. Last line:
RESULT {json}. It has run on a CPU, not yet on a device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs without installation

from engine import platform
from engine.config import Config
from engine.config.recipe import HOME, load_config
from engine.config.tree import usable_cores
from engine.errors import BadInput, MetronomeError
from engine.model.shape import read_shape
from engine.platform.base import Accelerator
from engine.run.commands import orchestrator_command
from engine.run.files import read_lines
from engine.run.folder import dump_config
from engine.run.memory import GIB, trainer_need
from engine.run.vllm_command import device_of, vllm_interpreter
from engine.tools.acceptance.run_parts import make_model

SIZES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "initializer_range": 3 / 1024**0.5,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "tiny": {},
}  # fmt: skip
"""Values of config.json: the published sizes of Qwen3-0.6B; the quickstart's."""
PUBLISHED = {
    "prime-rl, trainer alone, Qwen3-0.6B, RL, 16,384 tokens, one H100": {"tokens_per_s": 11_900, "mfu": 0.111},
    "prime-rl, trainer alone, Qwen3-0.6B, RL, 65,536 tokens, one H100": {"tokens_per_s": 10_150, "mfu": 0.268},
}
"""Rows of prime-rl's benchmarks/results/BENCHMARKS.md: FlashAttention 3, recomputation, with the optimizer. Their
responses are longer, and no rollout is in them."""
WARM_UP = 2
"""Steps that don't count: kernels are compiled in them."""
MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024)
PARTS = {"doctor": 0.15, "run": 0.5, "micro_step": 0.15, "embedded": 0.2}
"""The share of the minutes that each part may take. What a part leaves goes to those after it."""


@dataclass(frozen=True)
class Job:
    """What all parts share."""

    machine: platform.Platform
    folder: Path
    model: Path
    size: str
    steps: int
    response: int

    @property
    def tiny(self) -> bool:
        """Whether the sizes are those for a CPU."""
        return self.size == "tiny"


def main() -> None:
    arguments = parse()
    try:
        machine = platform.get_platform(arguments.device)
    except BadInput as error:
        raise SystemExit(f"error: {error}") from None
    on_cpu = machine.name == "cpu"
    size = arguments.size or ("tiny" if on_cpu else "0.6b")
    parts: dict[str, Callable[[Job, float], dict[str, Any]]] = {
        "doctor": doctor, "run": measured_run, "micro_step": micro_step, "embedded": embedded_step,
    }  # fmt: skip
    figures: dict[str, Any] = {"device": machine.device_name(0), "torch": torch.__version__, "model": size}
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="one-device-") as folder:
        model = make_model(Path(folder) / "model", SIZES[size])
        job = Job(machine, Path(folder), model, size, arguments.steps, 32 if size == "tiny" else arguments.response)
        for name, part in parts.items():
            left = sum(share for other, share in PARTS.items() if list(PARTS).index(other) >= list(PARTS).index(name))
            seconds = (end - time.monotonic()) * PARTS[name] / left
            print(f"--- {name}, at most {seconds:.0f} s", flush=True)
            begun = time.monotonic()
            try:
                figures[name] = part(job, seconds)
            except (MetronomeError, OSError, subprocess.SubprocessError) as error:
                figures[name] = {"failed": str(error)}
            figures[name]["part_s"] = round(time.monotonic() - begun, 1)
            print(json.dumps(figures[name], indent=1), flush=True)
    figures["published"] = PUBLISHED
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    print("RESULT " + json.dumps(figures))
    if failed := [name for name in parts if "failed" in figures[name]]:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, choices=["cuda", "npu", "cpu"])
    parser.add_argument("--size", choices=list(SIZES), help="default: 0.6b, on a CPU tiny")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of the run")
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response (0.6b)")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    return parser.parse_args()


# the parts ------------------------------------------------------------------------------------


def doctor(job: Job, seconds: float) -> dict[str, Any]:
    report = job.folder / "doctor.json"
    command = [sys.executable, "-c", "from flows.main import main; main()", "doctor", "--device", "--only", "devices"]
    command += ["--only", "kernels", "--out", str(report), "--set", f"platform.device={job.machine.name}"]
    run_command(command, job.folder / "doctor.log", seconds)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def measured_run(job: Job, seconds: float) -> dict[str, Any]:
    why_not = no_vllm(job.machine)
    config = configuration(job, "embedded" if why_not else "vllm", WARM_UP + job.steps)
    return {"no_vllm": why_not, **step_figures(config, train(job, config, seconds)[WARM_UP:])}


def embedded_step(job: Job, seconds: float) -> dict[str, Any]:
    config = configuration(job, "embedded", 1)
    return step_figures(config, train(job, config, seconds))


def micro_step(job: Job, seconds: float) -> dict[str, Any]:
    command = [sys.executable, str(HOME / "benchmarks/device.py"), "--device", job.machine.name]
    command += ["--tiny"] if job.tiny else ["--shapes", job.size]
    log = job.folder / "micro-step.log"
    run_command(command, log, seconds)
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1].removeprefix("RESULT "))
    return {"speed": found.get("speed"), "compared": len(found["correctness"])}


# how ------------------------------------------------------------------------------------------


def no_vllm(machine: platform.Platform) -> str:
    """Why vLLM cannot sample here; "" if it can."""
    try:
        device = device_of(vllm_interpreter(), machine.name)
    except BadInput as error:
        return str(error)
    return "" if device == machine.name else f"the environment with vLLM is for {device}"


def configuration(job: Job, engine: str, steps: int) -> Config:
    """The run's configuration, with the largest micro-batch that fits."""
    on_device = job.machine.name != "cpu"
    shared = on_device and engine == "vllm"
    dtype = "bfloat16" if shared else "float32"
    # the prompts have at most 256 tokens
    given: dict[str, Any] = {
        "run.name": f"{engine}-{steps}", "run.output": str(job.folder / "runs"), "model.path": str(job.model),
        "platform.device": job.machine.name, "data.train": str(HOME / "data/word_problems_train.jsonl"),
        "data.heldout": str(HOME / "data/word_problems_heldout.jsonl"),
        "reward.function": "engine.tools.acceptance.reward:even", "rollout.engine": engine,
        "rollout.max_new_tokens": job.response, "rollout.max_context": 256 + job.response, "rollout.group_size": 8,
        "train.prompts_per_step": 4 if job.tiny else 32, "train.steps": steps,
        "train.dtype": "bfloat16" if on_device else "float32", "model.dtype": dtype, "checkpoint.every": 0,
        "weights.transport": "file", "train.ratio_gap_limit": 0, "algorithm.kl_coef": 0.0,
    }  # fmt: skip
    if on_device:
        given["platform.memory_gib"] = device_gib(job.machine)
    else:
        cores = sorted(usable_cores())
        given |= {"train.devices": cores[:1], "rollout.devices": cores[1:2]}
    if shared:
        given |= {
            "rollout.devices": [0], "rollout.share_devices": True, "rollout.vllm.gpu_memory_utilization": 0.35,
        }  # fmt: skip
    elif on_device:
        given["rollout.devices"] = []
    if job.tiny:
        return load(given)
    shape = read_shape(job.model)
    needs = []
    for tokens in MICRO_BATCHES:
        config = load(given | {"train.micro_batch_tokens": tokens})
        needs.append(trainer_need(shape, config))
        if needs[-1].fits:
            return config
    raise MetronomeError(f"the trainer does not fit this device even with {MICRO_BATCHES[-1]} tokens a micro-batch: "
                         f"{needs[-1].summed()}")  # fmt: skip


def load(given: dict[str, Any]) -> Config:
    return load_config(
        None,
        [f"{key}={json.dumps(value) if isinstance(value, bool | list) else value}" for key, value in given.items()],
    )


def device_gib(machine: platform.Platform) -> float:
    """The memory that the device reports, in GiB."""
    assert isinstance(machine, Accelerator), f"{machine.name} has no device"
    return round(float(machine.api().get_device_properties(0).total_memory) / GIB, 1)


def train(job: Job, config: Config, seconds: float) -> list[dict[str, Any]]:
    """Run to the end, or to the deadline: then the steps until there count, if there is one beyond the warm-up."""
    file = job.folder / f"{config.run.name}.toml"
    dump_config(config, file)
    log = job.folder / f"{config.run.name}.log"
    late = ""
    try:
        run_command(list(orchestrator_command(file, False, None)), log, seconds)
    except subprocess.TimeoutExpired:
        late = f"no step beyond the warm-up in {seconds:.0f} s; its last lines:\n{tail(log)}"
    steps = list(read_lines(config.folder / "steps.jsonl"))
    if late and len(steps) <= min(WARM_UP, config.train.steps - 1):
        raise MetronomeError(late)
    return steps


def step_figures(config: Config, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps. Seconds; tokens/s count prompt and response of the trained responses."""

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    found: dict[str, Any] = {
        "engine": config.rollout.engine, "steps": len(steps), "micro_batch_tokens": config.train.micro_batch_tokens,
        "responses": config.train.prompts_per_step * config.rollout.group_size,
        "tokens_per_s_per_device": median("tokens_per_s_per_device"),
        "computed_tokens": median("computed_tokens"), "response_length_mean": median("response_length_mean"),
        "memory_peak_gib": max(max(step["memory_peak_gib"]) for step in steps),
        "largest_ratio_gap": max(step["max_ratio_gap"] for step in steps),
    }  # fmt: skip
    for name in ("step_s", "rollout_s", "wait_s", "train_s", "score_s", "update_s", "sync_s", "check_s"):
        found[name] = median(name)
    if all(step.get("mfu") is not None for step in steps):
        found["mfu"] = median("mfu")
        found["step_mfu"] = statistics.median(step["mfu"] * step["train_s"] / step["step_s"] for step in steps)
    return found


def run_command(command: list[str], log: Path, seconds: float) -> None:
    """Run a command with its output in `log`. Raises TimeoutExpired, and MetronomeError with its last lines."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=HOME)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
    if status:
        raise MetronomeError(f"{' '.join(command[1:5])} … ended with {status}; its last lines:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


if __name__ == "__main__":
    main()
