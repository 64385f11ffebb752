"""Where weights lie on their way to the instances."""

from engine.orchestrator.weight_sync.place import weights_folder
from support.runs import config_of


def test_weights_lie_in_shared_memory_unless_other_machines_may_write_them(tmp_path):
    scratch = tmp_path / "scratch"
    run_folder = tmp_path / "run"
    scratch.mkdir()
    nodes = {"parallel.nodes": 2, "parallel.data": 2, "parallel.rendezvous": "10.0.0.1:8000"}
    there = {
        "here": config_of({}),
        "over the network": config_of({"weights.transport": "gloo", "rollout.listen": "10.0.0.1:8000"}),
        "from several nodes": config_of(nodes),
    }
    found = {name: weights_folder(config, scratch, run_folder).parent for name, config in there.items()}
    by_client = {
        "a service's, by file": config_of({"rollout.listen": "10.0.0.1:8000"}),
        "a service's, here": config_of({"weights.transport": "gloo"}),
        "a service's": config_of({"weights.transport": "gloo", "rollout.listen": "10.0.0.1:8000"}),
    }
    for name, config in by_client.items():
        found[name] = weights_folder(config, scratch, run_folder, own_trainer=False).parent
    assert found == {
        "here": scratch,
        "over the network": scratch,
        "from several nodes": run_folder,
        "a service's, by file": scratch,
        "a service's, here": scratch,
        "a service's": run_folder,
    }
