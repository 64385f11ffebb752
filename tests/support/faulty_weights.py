"""Faults in weight syncs, put between the trainer's sender and the instances of a run in this process."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.orchestrator.publish.sync import WeightSync
from engine.wire.messages import Proceed, SyncOpened
from engine.wire.weights.checksum import tensor_checksum

TENSOR = "model.layers.1.mlp.up_proj.weight"


def skip(monkeypatch, version):
    """The trainer believes that it published the version; no instance hears of it."""
    kept = {
        name: getattr(WeightSync, name) for name in ("open_sync", "send_bucket", "finish_sync", "wait_until_checked")
    }
    nobody = SyncOpened(generation=0, members=(), world_size=1, connect=False, local=True, probe=())

    published = []

    async def opening(self, request):
        published.append(request.version)
        return nobody if request.version == version else await kept["open_sync"](self, request)

    async def bucket(self, request):
        return Proceed() if request.info.version == version else await kept["send_bucket"](self, request)

    async def finish(self, request):
        if request.version != version:
            await kept["finish_sync"](self, request)

    async def checked(self):
        if published[-1] != version:
            await kept["wait_until_checked"](self)

    for name, fault in zip(kept, (opening, bucket, finish, checked), strict=True):
        monkeypatch.setattr(WeightSync, name, fault)


def corrupt(monkeypatch, version, in_transit):
    """Noise on one tensor of the version: after the sender computed its checksum (`in_transit`), or before."""
    kept = WeightSync.send_bucket

    async def bucket(self, request):
        info = request.info
        if info.version == version and TENSOR in info.names:
            noisy = _add_noise(Path(info.path))
            if not in_transit:
                info.checksums[info.names.index(TENSOR)] = tensor_checksum(noisy)
        return await kept(self, request)

    monkeypatch.setattr(WeightSync, "send_bucket", bucket)


def _add_noise(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors[TENSOR] += 0.05 * torch.randn(tensors[TENSOR].shape)
    save_file(tensors, path, metadata)
    return tensors[TENSOR]
