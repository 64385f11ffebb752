"""Checkpoints that are everything (contract 8) and never look complete when they are not.

A checkpoint is a folder of safetensors and JSON, written under a temporary name, renamed, its marker written last.
Readers trust the marker only. No pickle.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import BadInput
from engine.trainer.policy import Policy

MARKER = "_SUCCESS.json"


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint taken before step `step` (weight version = step)."""
    return root / f"step-{step:06d}"


def complete(folder: Path) -> bool:
    """Whether the checkpoint is whole: marker there, every file of the size that the marker says."""
    marker = folder / MARKER
    if not marker.is_file():
        return False
    sizes = json.loads(marker.read_text())["files"]
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under a root folder."""
    found = sorted(folder for folder in root.glob("step-*") if complete(folder))
    return found[-1] if found else None


def step_of(folder: Path) -> int:
    """The step with which a run goes on from this checkpoint."""
    return int(json.loads((folder / MARKER).read_text())["step"])


def save(root: Path, step: int, policy: Policy, reference_hash: str | None, keep: int) -> Path:
    """Write the checkpoint before step `step`, then delete all but the newest `keep` complete ones."""
    target = folder_of(root, step)
    if not complete(target):
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, step, policy, reference_hash)
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        partial.rename(target)
        _write_json(target / MARKER, {"step": step, "weight_version": step, "files": files})
    for old in sorted(folder for folder in root.glob("step-*") if complete(folder))[:-keep]:
        shutil.rmtree(old)
    return target


def _write(folder: Path, step: int, policy: Policy, reference_hash: str | None) -> None:
    models = policy.models
    save_file(_weights(models.policy), folder / "policy.safetensors")
    if models.old is not None:
        save_file(_weights(models.old), folder / "old.safetensors")
    save_file(dict(_moments(policy)), folder / "optimizer.safetensors")
    state = {
        "step": step,
        "weight_version": step,
        "layout": {"world": 1},
        "reference_hash": reference_hash,
        "scheduler": policy.scheduler.state_dict(),
        "optimizer_step": [group.get("step", 0) for group in policy.optimizer.optimizer.param_groups],
        "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "config": policy.config.model_dump(mode="json"),
    }
    _write_json(folder / "state.json", state)


def load(folder: Path, policy: Policy, reference_hash: str | None) -> int:
    """Put everything back; returns the step to go on with. Raises BadInput if it does not fit the run."""
    state = json.loads((folder / "state.json").read_text())
    if state["reference_hash"] != reference_hash:
        raise BadInput(f"checkpoint {folder}: it was taken with another reference model (content hash differs); "
                       "resume with the model.path that the run started from")
    models = policy.models
    _copy(load_file(folder / "policy.safetensors"), models.policy, folder)
    if models.old is not None:
        _copy(load_file(folder / "old.safetensors"), models.old, folder)
    _load_moments(policy, load_file(folder / "optimizer.safetensors"), state["optimizer_step"])
    policy.scheduler.load_state_dict(state["scheduler"])
    policy.scheduler.step(increment=0)
    rng = bytearray(base64.b64decode(state["rng"]))
    torch.set_rng_state(torch.frombuffer(rng, dtype=torch.uint8))
    return int(state["step"])


def _weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], model: torch.nn.Module, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        raise BadInput(f"checkpoint {folder}: it holds other parameters than the model of this run")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _moments(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Adam's state of each parameter, by name (empty before the first update)."""
    states = policy.optimizer.optimizer.state
    for name, parameter in policy.models.policy.named_parameters():
        for key, value in states.get(parameter, {}).items():
            yield f"{key}/{name}", torch.as_tensor(value).detach().clone()


def _load_moments(policy: Policy, tensors: Mapping[str, Tensor], steps: list[int]) -> None:
    optimizer = policy.optimizer.optimizer
    parameters = dict(policy.models.policy.named_parameters())
    for full, tensor in tensors.items():
        key, _, name = full.partition("/")
        optimizer.state[parameters[name]][key] = tensor.clone()
    for group, step in zip(optimizer.param_groups, steps, strict=True):
        if step:
            group["step"] = step


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1))
    partial.rename(path)

