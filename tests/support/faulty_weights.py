"""Faults in weight syncs, put between the trainer's sender and the instances of a run in this process."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.orchestrator.publish.publishes import Publishes
from engine.wire.weights.checksum import tensor_checksum

TENSOR = "model.layers.1.mlp.up_proj.weight"


def skip(monkeypatch, version):
    """The trainer believes that it published the version; no instance hears of it. Weights must be staged."""
    kept = Publishes.open

    async def opening(publishes, request):
        opened = await kept(publishes, request)
        if request.version == version:
            publishes.members = []
        return opened

    monkeypatch.setattr(Publishes, "open", opening)


def corrupt(monkeypatch, version, in_transit):
    """Noise on one tensor of the version: after the sender computed its checksum (`in_transit`), or before."""
    kept = Publishes.send

    async def bucket(self, request):
        info = request.info
        if info.version == version and TENSOR in info.names:
            tensors = _add_noise(Path(info.path))
            if not in_transit:
                info.checksum = tensor_checksum(*(tensors[name] for name in info.names))
        return await kept(self, request)

    monkeypatch.setattr(Publishes, "send", bucket)


def _add_noise(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors[TENSOR] += 0.05 * torch.randn(tensors[TENSOR].shape)
    save_file(tensors, path, metadata)
    return tensors
