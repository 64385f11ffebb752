"""Where weights lie on their way to the instances."""

from engine.orchestrator.weight_sync.place import weights_folder
from support.runs import config_of


def test_weights_lie_in_shared_memory_unless_other_nodes_write_them_too(tmp_path):
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
    assert found == {"here": scratch, "over the network": scratch, "from several nodes": run_folder}
