"""What a run asks of a cluster."""

import pytest

from engine.config import Config
from engine.config.placing import bundles_of
from engine.config.recipe import load_config
from engine.run.folder import dump_config
from engine.tools.dry_run.plan import plan_run
from support.runs import ROOT

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
