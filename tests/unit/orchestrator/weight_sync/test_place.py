"""Where weights lie on their way to the instances."""

from engine.orchestrator.weight_sync.place import weights_folder
from support.runs import config_of


def test_instances_of_other_machines_find_a_snapshot_in_the_run_folder(tmp_path):
    scratch = tmp_path / "scratch"
    run_folder = tmp_path / "run"
    scratch.mkdir()
    there = {
        "here": config_of({}),
        "by file, listening for others": config_of({"rollout.listen": "10.0.0.1:8000"}),
        "over the network, all here": config_of({"weights.transport": "gloo"}),
        "over the network": config_of({"weights.transport": "gloo", "rollout.listen": "10.0.0.1:8000"}),
    }
    found = {name: weights_folder(config, scratch, run_folder).parent for name, config in there.items()}
    assert found == {
        "here": scratch,
        "by file, listening for others": scratch,
        "over the network, all here": scratch,
        "over the network": run_folder,
    }
