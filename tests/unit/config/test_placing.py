"""What a run asks of a cluster."""

import pytest

from engine.config import Config
from engine.config.placing import bundles_of, count_devices
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.folder import dump_config
from engine.tools.dry_run.plan import RunPlan, plan_run
from support.runs import ROOT, overrides
from tasks.cluster import devices

NPU = ["rollout.engine=vllm", "platform.device=npu"]
ON_RAY = ["cluster.engine=ray"]
PAPERS = sorted((ROOT / "infra/recipes/papers").glob("*.toml"))


@pytest.mark.parametrize("recipe", PAPERS, ids=lambda path: path.stem)
def test_a_paper_asks_for_the_devices_that_its_dry_run_counts_and_none_is_larger_than_a_node(recipe):
    config = load_config(recipe, ON_RAY)
    asked = bundles_of(config, "NPU")
    amounts = [bundle["NPU"] for bundle in (*asked.nodes, *asked.instances)]
    assert sum(amounts) == plan_run(load_config(recipe)).devices
    assert max(amounts) <= config.platform.devices_per_node
    assert len(asked.nodes) == config.parallel.nodes


def test_the_reference_is_on_the_first_node_and_embedded_instances_are_on_cpus():
    config = Config(
        cluster={"engine": "ray"},
        parallel={"data": 4, "nodes": 2, "rendezvous": "auto:29500"},
        algorithm={"kl_coef": 0.1},
        stages={"reference": {"data": 3}},
        rollout={"instances": 0},
        dry_run={"joining": 2},
    )
    assert bundles_of(config, "GPU") == ([{"GPU": 5.0}, {"GPU": 2.0}], [{"CPU": 1.0}, {"CPU": 1.0}])
    assert bundles_of(config, "GPU", training=False).nodes == []


def test_all_instances_join_a_run_on_ray_and_reading_its_config_again_changes_nothing(tmp_path):
    sets = ["rollout.instances=3", "dry_run.joining=2", "rollout.devices=[7,8,9]", *NPU]
    here, there = (load_config(ROOT / "infra/recipes/quickstart.toml", [*sets, *more]) for more in ([], ON_RAY))
    assert (here.rollout.instances, here.dry_run.joining) == (3, 2)
    assert (there.rollout.instances, there.rollout.devices, there.dry_run.joining) == (0, [], 5)
    again = tmp_path / "config.toml"
    dump_config(there, again)
    assert load_config(again) == there


SHARED = {"rollout.engine": "vllm", "rollout.share_devices": True, "rollout.vllm.gpu_memory_utilization": 0.4}


@pytest.mark.parametrize(
    ("keys", "visible", "wanted"),
    [
        ({"rollout.devices": [0]}, None, 1),
        ({"rollout.devices": [3]}, "3", 1),
        ({"rollout.devices": [0]}, "3", 2),
        ({"rollout.devices": [0, 1, 2, 3], "rollout.instances": 4, "parallel.data": 4}, None, 4),
        ({"rollout.devices": [2, 3, 4, 5], "rollout.instances": 2, "rollout.tensor": 2, "parallel.data": 4}, None, 6),
        ({"rollout.devices": [0], "dry_run.joining": 2, "rollout.listen": "10.0.0.1:7000"}, None, 3),
        ({"rollout.devices": [1], "rollout.share_devices": False}, None, 2),
    ],
)
def test_a_device_that_trainer_and_instances_share_counts_once(monkeypatch, tmp_path, keys, visible, wanted):
    """In the dry run, and for the limit of Prefect."""
    monkeypatch.setattr(devices, "CUDA_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = SHARED | {"platform.device": "cuda"} | keys
    config = load_config(None, overrides(given))
    assert RunPlan(config, *[None] * 5).devices == count_devices(config) == wanted
    assert devices.count_devices(config) == (wanted - config.dry_run.joining, devices.CUDA_DEVICES)


def test_npus_are_not_shared():
    with pytest.raises(BadInput, match="NPUs can't be shared"):
        load_config(None, overrides(SHARED | {"platform.device": "npu"}))
