"""Faults in weight syncs, put between the trainer's sender and the instances of a run in this process."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.launcher.weight_sync.sync import WeightSync
from engine.wire.weights.checksum import checksum

TENSOR = "model.layers.1.mlp.up_proj.weight"


def skip(monkeypatch, version):
    """The trainer believes that it published the version; no instance hears of it."""
    kept = {name: getattr(WeightSync, name) for name in ("open", "bucket", "finish", "checked")}
    nobody = {"generation": 0, "members": [], "world_size": 1, "connect": False, "local": True, "probe": []}

    published = []

    async def opening(self, number):
        published.append(number)
        return nobody if number == version else await kept["open"](self, number)

    async def bucket(self, info):
        return {} if info["version"] == version else await kept["bucket"](self, info)

    async def finish(self, number, *rest):
        return {} if number == version else await kept["finish"](self, number, *rest)

    async def checked(self):
        return {} if published[-1] == version else await kept["checked"](self)

    for name, fault in (("open", opening), ("bucket", bucket), ("finish", finish), ("checked", checked)):
        monkeypatch.setattr(WeightSync, name, fault)


def corrupt(monkeypatch, version, in_transit):
    """Noise on one tensor of the version: after the sender computed its checksum (`in_transit`), or before."""
    kept = WeightSync.bucket

    async def bucket(self, info):
        if info["version"] == version and TENSOR in info["names"]:
            noisy = _add_noise(Path(info["path"]))
            if not in_transit:
                info["checksums"][info["names"].index(TENSOR)] = checksum(noisy)
        return await kept(self, info)

    monkeypatch.setattr(WeightSync, "bucket", bucket)


def _add_noise(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    tensors[TENSOR] += 0.05 * torch.randn(tensors[TENSOR].shape)
    save_file(tensors, path, metadata)
    return tensors[TENSOR]
