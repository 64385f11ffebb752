"""How a rank of the trainer starts on a device."""

from types import SimpleNamespace

import pytest

from engine.platform.cuda import Cuda
from engine.run.memory import CONTEXTS_GIB, GIB
from engine.trainer.ranks.rank_process import leave_memory
from support.runs import config_of

SHARED = {"rollout.engine": "vllm", "rollout.share_devices": True, "rollout.vllm.gpu_memory_utilization": 0.4}


class TwoGpus(Cuda):
    """A machine with two GPUs of 80 GiB, which are not there."""

    def __init__(self):
        self.limits = {}

    def api(self):
        return SimpleNamespace(
            device_count=lambda: 2,
            get_device_properties=lambda device: SimpleNamespace(total_memory=80 * GIB),
            set_per_process_memory_fraction=lambda share, device: self.limits.update({device.index: share}),
        )


@pytest.mark.parametrize(
    ("keys", "limits"), [({}, {}), (SHARED, {1: pytest.approx(0.6 - CONTEXTS_GIB / 80)})], ids=["alone", "shared"]
)
def test_a_rank_allocates_only_what_vllm_leaves_of_their_device(monkeypatch, keys, limits):
    """An instance asks for its whole share whenever it starts."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    machine = TwoGpus()
    leave_memory(config_of(keys), machine)
    assert machine.limits == limits
