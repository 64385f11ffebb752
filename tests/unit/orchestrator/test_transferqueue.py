"""On which nodes of a Ray cluster the storage units of a run lie. Ray itself is in
tests/integration/test_transferqueue_cluster.py."""

import sys
from types import SimpleNamespace

from engine.orchestrator.transferqueue import _nodes
from engine.run.commands import STORE_NODES


def test_units_lie_on_the_nodes_of_a_run_that_ray_placed_else_on_all(monkeypatch):
    alive = {"a": True, "b": True, "c": False, "d": True}
    found = [{"NodeID": name, "Alive": lives, "Resources": {"CPU": 4.0}} for name, lives in alive.items()]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: found))
    monkeypatch.delenv(STORE_NODES, raising=False)
    assert _nodes({}) == ["a", "b", "d"]
    monkeypatch.setenv(STORE_NODES, "b,c")
    assert _nodes({}) == ["b"]
    assert _nodes({"b"}) == ["a", "d"]  # no node of the run is left
