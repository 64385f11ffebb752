"""Where weights lie on their way to the instances."""

from engine.orchestrator.opening import weights_folder
from support.runs import config_of


def test_weights_lie_in_shared_memory_unless_several_nodes_write_them(tmp_path):
    several = {"parallel.nodes": 2, "parallel.data": 2, "parallel.rendezvous": "10.0.0.1:8000"}
    for keys, found in (({}, "scratch"), ({"rollout.listen": "10.0.0.1:8000"}, "scratch"), (several, "run")):
        (tmp_path / "scratch").mkdir(exist_ok=True)
        assert weights_folder(config_of(keys), tmp_path / "scratch", tmp_path / "run") == tmp_path / found / "weights"
