"""How many NPUs a run takes from the limit, without a server; tests/stack/test_deployments.py takes them."""

import pytest

from engine.config import Config
from tasks.cluster import devices

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
    assert devices.count_npus(config, pool, training=kind) == wanted


@pytest.mark.parametrize(
    ("device", "driver", "wanted"),
    [
        ("npu", False, 3),
        ("auto", True, 3),
        ("auto", False, 0),
        ("cpu", True, 0),
        ("cuda", True, 0),
    ],
)
def test_npus_are_counted_where_there_are_some(device, driver, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "NPU_MANAGER", tmp_path if driver else tmp_path / "none")
    config = Config(rollout={"instances": 2}, platform={"device": device})
    assert devices.count_npus(config) == wanted
