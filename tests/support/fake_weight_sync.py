"""Weight syncs between devices that are not there: `python fake_weight_sync.py DEVICE TRANSPORT[+staged] …`

The publisher, the orchestrator's weight sync, the receivers of two instances and the transport are the real ones, and
so are their threads. Weights and buffers are fake tensors on the device (benchmarks/fake_device.py). The group
broadcasts over gloo pieces of host memory that are as large, and refuses what NCCL and HCCL can't send. Prints what
happened as JSON, a line for each transport.
"""

import json
import os
import sys
import tempfile
import threading
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parents[1])]

from fake_device import everywhere

from engine.instance.receiver import Receiver
from engine.wire.weights.backends import BACKENDS, DeviceBackend, Gloo
from support import weights_double
from support.weights_double import TIMEOUT_S, Client, Model, Orchestrator, base_folder, publisher

chosen = threading.local()
"""`device`: the one that the thread has made its current one."""


class OverDevices(DeviceBackend):
    """A backend between devices of a kind."""

    def __init__(self, kind):
        self.device = kind
        self.pieces = []

    def make(self, place):
        return OverGloo(self, Gloo().make(place))

    def abort(self, group):
        pass


class OverGloo:
    def __init__(self, backend, gloo):
        self._backend = backend
        self._gloo = gloo
        self._device = None

    def eager_connect_single_device(self, device):
        self._device = device

    def broadcast(self, piece, root):
        assert piece.device == self._device, f"a piece lies on {piece.device}, the group is of {self._device}"
        assert getattr(chosen, "device", None) == self._device, "the thread sends from a device that is not its own"
        assert piece.dtype is torch.uint8
        assert piece.is_contiguous()
        self._backend.pieces.append(piece.numel())
        return self._gloo.broadcast(torch.zeros(piece.numel(), dtype=torch.uint8), root)


def on(device, model):
    """The model with its tensors on the device, one of them not contiguous, so that it has to be packed."""
    model.held = {name: tensor.to(device) for name, tensor in model.held.items()}
    model.held["c"] = model.held["c"].t().contiguous().t()
    return model


def from_the_host(logprobs):
    """The log-probabilities of the weights that the device would send to the host."""
    return lambda held, token_ids: logprobs({name: tensor.cpu().float() for name, tensor in held.items()}, token_ids)


def main():
    device = torch.device(sys.argv[1])
    weights_double.logprobs = from_the_host(weights_double.logprobs)
    torch.accelerator.set_device_index = partial(setattr, chosen, "device")
    for argument in sys.argv[2:]:
        transport, _, staged = argument.partition("+")
        if transport in ("nccl", "hccl"):
            BACKENDS[transport] = OverDevices(device.type)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(synced(device, transport, bool(staged), Path(folder))), flush=True)


def synced(device, transport, staged, folder):
    """Publish two versions to two instances."""
    with everywhere(device) as fake:
        clients = [Client(name, base_folder(folder / name)) for name in "ab"]
        for client in clients:
            client.receiver = Receiver(TIMEOUT_S, device)
        orchestrator = Orchestrator(list(clients), staged)
        sender = publisher(orchestrator, transport, folder, device=device, dtype=torch.bfloat16)
        for version in (1, 2):
            sender.publish(on(device, Model(version)), version)
        orchestrator.close()
    held = [tensor for client in clients for tensor in client.held.values()]
    return {
        "versions": [client.version for client in clients],
        "received_on": sorted({str(tensor.device) for tensor in held}),
        "dtypes": sorted({str(tensor.dtype) for tensor in held}),
        "pieces": Counter(getattr(BACKENDS.get(transport), "pieces", [])),
        "waits": len(fake.waits),
    }


def run():
    """`main`; after an error without waiting for the threads of the others."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    run()
