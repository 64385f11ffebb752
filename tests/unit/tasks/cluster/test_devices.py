"""How many devices a run takes from their limit, without a server; tests/stack/test_deployments.py takes them."""

from contextlib import contextmanager, nullcontext

import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from engine.config import Config
from engine.errors import BadInput
from tasks.cluster import devices, local_server

TRAINING = True
EVALUATING = False


@pytest.mark.parametrize(
    ("instances", "tensor", "pool", "ranks", "kind", "wanted"),
    [
        (4, 2, 0, 8, TRAINING, 16),
        (4, 2, 4, 8, TRAINING, 24),  # 8 ranks, 4 instances of two here and 4 on the pool
        (0, 2, 4, 8, TRAINING, 16),  # all on the pool
        (0, 2, 0, 8, TRAINING, 8),  # they join by hand, with devices that this run does not count
        (0, 4, 0, 2, TRAINING, 4),  # its evaluations start one of four, while the two ranks are not there
        (4, 2, 0, 8, EVALUATING, 8),
        (0, 2, 0, 8, EVALUATING, 2),  # it starts one
        (0, 2, 3, 8, EVALUATING, 6),  # it starts none: those on the pool evaluate
        (1, 4, 1, 8, EVALUATING, 8),
    ],
)
def test_npus_of_a_run(instances, tensor, pool, ranks, kind, wanted):
    config = Config(
        rollout={"engine": "vllm", "instances": instances, "tensor": tensor},
        parallel={"data": ranks},
        platform={"device": "npu"},
    )
    assert devices.count_devices(config, pool, training=kind) == (wanted, devices.NPUS)


@pytest.mark.parametrize(
    ("device", "npus", "cuda", "wanted"),
    [
        ("npu", False, 0, (3, devices.NPUS)),
        ("auto", True, 8, (3, devices.NPUS)),
        ("auto", False, 0, (1, devices.CPU_SLOTS)),
        ("auto", False, 2, (3, devices.CUDA_DEVICES)),
        ("cuda", True, 8, (8, devices.CUDA_DEVICES)),  # all of the machine: else another would take device 0, too
        ("cpu", True, 8, (1, devices.CPU_SLOTS)),
    ],
)
def test_each_kind_of_device_is_counted_by_its_own_limit(device, npus, cuda, wanted, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidiactl", *(f"nvidia{number}" for number in range(cuda))):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "CUDA_FILES", tmp_path)
    monkeypatch.setattr(devices, "NPU_MANAGER", tmp_path if npus else tmp_path / "none")
    config = Config(rollout={"instances": 2}, platform={"device": device})
    assert devices.count_devices(config) == wanted
    if wanted[0] == 8:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert devices.count_devices(config) == (4, devices.CUDA_DEVICES)


@pytest.mark.parametrize(
    ("chosen", "wanted"), [(None, 4), ("", 0), ("-1", 0), ("2,0", 2), ("0,-1,1", 1), ("0,1,2,3,4", 4)]
)
def test_a_process_sees_the_cuda_devices_that_its_environment_leaves_it(chosen, wanted, tmp_path, monkeypatch):
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(4))):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "CUDA_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert devices.visible_cuda_devices() == wanted


@pytest.mark.parametrize(
    ("limit", "server", "refused"),
    [
        (devices.NPUS, "http://shared/api", True),
        (devices.NPUS, "http://own/api", False),
        (devices.CUDA_DEVICES, "http://shared/api", False),
        (devices.CPU_SLOTS, "http://shared/api", False),
    ],
)
def test_npus_need_a_limit_only_on_a_server_that_others_use(limit, server, refused, monkeypatch):
    @contextmanager
    def without_limits(*_, **__):
        raise ConcurrencySlotAcquisitionError("there is no such limit")
        yield

    monkeypatch.setattr(devices, "concurrency", without_limits)
    monkeypatch.setattr(local_server, "OWN", ["http://own/api"])
    monkeypatch.setattr(devices, "OWN", local_server.OWN)
    monkeypatch.setenv("PREFECT_API_URL", server)
    said = pytest.raises(BadInput, match=f"Prefect has no limit {limit}") if refused else nullcontext()
    with said, devices.hold_devices(2, limit):
        assert not refused
