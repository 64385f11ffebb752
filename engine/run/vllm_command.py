"""Composes the command that starts a rollout instance with vLLM in vLLM's own environment. This code itself runs in the
trainer's environment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

from engine.config import Config
from engine.config.tree import foreign_cores
from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.run.memory import beside_cache

PYTHON = "METRONOME_VLLM_PYTHON"
"""Environment variable with the interpreter of an environment with vLLM, to use instead of the one from `make vllm`."""

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-vllm"
LISTS = ROOT / "infra" / "vllm"
MARKER = "metronome-vllm"
"""File in the environment that infra/vllm/install.sh writes last: the device, a checksum, and the packages."""

DEVICES = ("cpu", "cuda", "npu")
GIB = 2**30
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variable that lists the devices visible to a process, by kind of device."""
CPU_CACHE_GIB = 16
"""Largest size of the key-value cache on a CPU in GiB. If the responses need more, they take turns."""


def instance_command_line(
    config: Config, model: Path, name: str, number: int, port_file: Path
) -> tuple[list[str], dict[str, str]]:
    """Command line and extra environment of instance `number` (0 …). It writes {"host", "port", "pid"} to `port_file`.

    Raises BadInput if there is no environment with vLLM (the message says how to get one), or if there are too few
    devices.
    """
    rollout = config.rollout
    python = vllm_interpreter()
    device = device_of(python, config.platform.device)
    mine = config.instance_cores(number)
    if device != "cpu" and mine and len(mine) != rollout.tensor:
        raise BadInput(
            f"rollout.devices gives {name} {len(mine)} devices; rollout.tensor = {rollout.tensor} needs "
            f"{rollout.tensor}"
        )
    pairs = {
        "--model": str(model),
        "--name": name,
        "--port-file": str(port_file),
        "--slots": str(config.slots),
        "--max-context": str(rollout.max_context),
        "--dtype": config.model.dtype,
        "--head-dtype": config.model.head_dtype,
        "--device": device,
        "--tensor": str(rollout.tensor),
        "--transport": config.weights.transport,
    }
    if rollout.share_devices:
        pairs["--beside-cache"] = str(beside_cache(read_shape(model), config))
    if rollout.vllm:
        pairs["--vllm"] = json.dumps(rollout.vllm)
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if device == "npu":
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # vllm-ascend needs it; engine/__init__.py sets 0
    if device == "cpu":
        check_for_cpu(config)
        pairs["--threads"] = str(max(1, config.instance_threads // rollout.tensor))
        if mine:
            pairs["--cores"] = ",".join(map(str, mine))
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(_cache_gib(config, model)))
        }
    elif mine:
        environment[VISIBLE[device]] = ",".join(map(str, mine))
    flags = ["--routes"] if config.algorithm.routing_replay else []
    arguments = [*(part for pair in pairs.items() for part in pair), *flags]
    return [python, "-m", "engine.instance.vllm", *arguments], environment


def vllm_interpreter() -> str:
    """The interpreter of the environment with vLLM. Raises BadInput if there is none, or if `make vllm` built it from a
    list of packages that has changed since."""
    if given := os.environ.get(PYTHON):
        if not os.access(given, os.X_OK):
            raise BadInput(
                f"{PYTHON}={given}: there is no interpreter; expected the python of an environment with vLLM"
            )
        return given
    python = ENVIRONMENT / "bin" / "python"
    marker = ENVIRONMENT / MARKER
    if not marker.is_file() or not python.exists() or marker.read_text().split("\n")[0] not in DEVICES:
        raise BadInput(
            f'rollout.engine = "vllm" needs vLLM in {ENVIRONMENT}: run `make vllm` (DEVICE=cuda or npu for those), '
            f"or set {PYTHON} to the python of an environment with vLLM"
        )
    device, *rest = marker.read_text().splitlines()
    if _packages(rest[1:]) != _packages((LISTS / f"{device}.txt").read_text().splitlines()):
        raise BadInput(
            f"{ENVIRONMENT} was built from another infra/vllm/{device}.txt than the current one: run `make vllm "
            f"DEVICE={device}` again"
        )
    return str(python)


def _packages(lines: Iterable[str]) -> set[str]:
    """The packages in a list, without comments."""
    return {wanted for line in lines if (wanted := line.strip()) and not wanted.startswith("#")}


def visible_devices(device: str) -> list[str]:
    """Devices that the environment variable makes visible to this process, in order; empty if it is not set."""
    return [name for part in os.environ.get(VISIBLE[device], "").split(",") if (name := part.strip())]


def check_for_cpu(config: Config) -> None:
    """Raise BadInput for settings that vLLM on a CPU does not support: returning routes, or running on cores that this
    process does not have (rollout.devices are cores there)."""
    if config.algorithm.routing_replay:
        raise BadInput(
            "algorithm.routing_replay: vLLM on a CPU does not record which experts compute a token; set it to false"
        )
    if wrong := foreign_cores("rollout.devices", config.rollout.devices):
        raise BadInput(wrong)


def device_of(python: str, configured: str = "auto") -> str:
    """The device for which the environment's vLLM was built: cpu, cuda or npu."""
    marker = Path(python).parent.parent / MARKER
    if marker.is_file():
        return marker.read_text().split("\n")[0]
    if configured == "auto":
        raise BadInput(
            f"{python}: `make vllm` did not build this environment, so the device of its vLLM is not known; "
            "set platform.device to cpu, cuda or npu"
        )
    return configured


def _cache_gib(config: Config, model: Path) -> int:
    """Size in GiB of the keys and values of all responses at full length; at least 1, at most CPU_CACHE_GIB."""
    shape = json.loads((model / "config.json").read_text())
    heads = shape["num_attention_heads"]
    width = max(32, shape.get("head_dim") or shape["hidden_size"] // heads)  # the narrowest that vLLM supports there
    size = 4 if config.model.dtype == "float32" else 2
    token = 2 * shape["num_hidden_layers"] * (shape.get("num_key_value_heads") or heads) * width * size
    rollout = config.rollout
    tokens = config.slots * rollout.max_context
    return min(CPU_CACHE_GIB, max(1, math.ceil(token * tokens / rollout.tensor / GIB)))
