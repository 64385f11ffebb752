"""Which devices a backend sends from, and what a process that lacks the backend is told."""

import os
import sys
import types

import pytest
import torch
import torch.distributed as dist

from engine.errors import BadInput
from engine.wire.weights.backends import BACKENDS, Membership, group_device

NPU = types.SimpleNamespace(type="npu", index=1)
"""torch knows the name of this type only with torch_npu."""
PLACE = Membership(store=None, rank=1, world=3, own="127.0.0.1", timeout_s=5.0)


@pytest.mark.parametrize(
    ("backend", "model", "found"),
    [
        ("gloo", torch.device("cpu"), torch.device("cpu")),
        ("gloo", torch.device("cuda", 3), torch.device("cpu")),
        ("nccl", torch.device("cuda", 3), torch.device("cuda", 3)),
        ("hccl", NPU, NPU),
    ],
)
def test_the_device_is_that_of_the_model_where_the_backend_sends_from_devices(backend, model, found):
    assert group_device(backend, model) == found


@pytest.mark.parametrize(
    ("backend", "model", "message"),
    [
        ("nccl", "cpu", "model is on cpu, not on a numbered cuda device; use gloo or file"),
        ("nccl", "cuda", "model is on cuda, not on a numbered cuda device"),
        ("hccl", "cuda:0", "model is on cuda:0, not on a numbered npu device"),
        ("mpi", "cpu", "transport 'mpi': expected one of gloo, nccl, hccl"),
    ],
)
def test_other_devices_and_backends_are_refused(backend, model, message):
    with pytest.raises(BadInput, match=message):
        group_device(backend, torch.device(model))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_named():
    with pytest.raises(BadInput, match="transport nccl: this process's torch is built without NCCL; use gloo or file"):
        BACKENDS["nccl"].make(PLACE)


def test_a_process_without_torch_npu_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(BadInput, match="transport hccl: torch_npu can't be imported"):
        BACKENDS["hccl"].make(PLACE)


@pytest.mark.parametrize("name", ["RANK_TABLE_FILE", "ROOTINFO_SUBCOMM_ENABLE"])
def test_a_job_that_fixes_the_members_of_its_groups_is_refused(monkeypatch, name):
    monkeypatch.setitem(os.environ, name, "1")
    with pytest.raises(BadInput, match=f"transport hccl: the environment variable {name} is set"):
        BACKENDS["hccl"].make(PLACE)


class Group:
    """Keeps the order of what is called; a broadcast takes a while."""

    def __init__(self, succeeds):
        self.calls = []
        self.looks = 0
        self.succeeds = succeeds

    def eager_connect_single_device(self, device):
        self.calls.append(device)

    def broadcast(self, piece, root):
        self.calls.append((piece.device, piece.nbytes, root))
        return types.SimpleNamespace(
            is_completed=self.completed, wait=lambda: self.calls.append("wait"), is_success=lambda: self.succeeds
        )

    def completed(self):
        self.looks += 1
        return self.looks > 3


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_a_communicator_is_made_and_used_once_before_the_first_bucket(backend):
    """torch makes NCCL's by the first call, and NCCL connects the devices in the second; HCCL needs the second."""
    group = Group(succeeds=True)
    BACKENDS[backend].connect(group, torch.device("cpu"))
    assert group.calls == [torch.device("cpu"), (torch.device("cpu"), 1, 0), "wait"]
    assert group.looks > 3


def test_a_failed_broadcast_over_hccl_is_an_error_though_its_wait_raises_nothing():
    with pytest.raises(RuntimeError, match="HCCL reports an error"):
        BACKENDS["hccl"].connect(Group(succeeds=False), torch.device("cpu"))
