"""Runs whose columns lie in TransferQueue's units on the nodes of a Ray cluster: three nodes on this machine."""

import subprocess
import sys

import pytest

from engine.orchestrator.launch import launch_run as launch_here
from support.ports import two_neighbours
from support.ray_nodes import kill_node, ray_cluster
from support.runs import ROOT, config_of, wait_for, write_config
from support.transferqueue import ELSEWHERE, EXACT, MARKS, disturbed, reads, starts
from support.whole_runs import run, same, steps, weights

pytestmark = MARKS
NODES = 3


@pytest.fixture
def cluster(monkeypatch):
    """A user's cluster, which asks for the token that is in the environment of the run."""
    with ray_cluster(monkeypatch, [{}] * NODES) as found:
        yield found


@pytest.fixture
def exact(settings):
    return settings | EXACT | {"train.steps": 2, "train.mode": "sync"}


def on(cluster, name):
    return ELSEWHERE | {"run.name": name, "queue.address": cluster.address}


def actors(cluster):
    """The actors that live in the cluster, as (class, id of the node)."""
    return [
        (actor["ActorClassName"], actor["Address"]["NodeID"])
        for actor in cluster.global_state.actor_table(None, None, None).values()
        if actor["State"] == "ALIVE"
    ]


def is_left_alone(cluster):
    """Whether all nodes are alive, and no actor is left."""
    alive = [node for node in cluster.global_state.node_table() if node["Alive"]]
    return len(alive) == NODES and not actors(cluster)


def in_orchestrator(exact, folder):
    """Weights of the run whose columns lie in the orchestrator."""
    run(exact | {"run.name": "orchestrator"}, folder)
    return weights(folder, "orchestrator")


def test_units_on_three_nodes_give_the_same_bits_and_the_cluster_is_left_as_it_was(
    exact, tmp_path, cluster, monkeypatch
):
    expected = in_orchestrator(exact, tmp_path)
    read = reads(monkeypatch)
    started = starts(monkeypatch)
    lived = []
    disturbed(monkeypatch, lambda store: lived.extend(actors(cluster)))
    launch_here(config_of(exact | on(cluster, "cluster")))
    assert same(weights(tmp_path, "cluster"), expected)
    assert read == []  # the leader fetched all from the units
    nodes = {node["NodeID"] for node in cluster.global_state.node_table()}
    (addresses,) = started
    assert {unit.node for unit in addresses.units} == nodes
    assert {node for kind, node in lived if kind == "SimpleStorageUnit"} == nodes
    assert len(lived) == NODES + 1
    wait_for(lambda: is_left_alone(cluster), "the end of the run's actors", 30)


def test_the_columns_on_a_node_that_dies_are_generated_again_with_the_same_bits(exact, tmp_path, cluster, monkeypatch):
    expected = in_orchestrator(exact, tmp_path)
    started = starts(monkeypatch)

    def kill(store):
        here = store.addresses.controller.node
        node = next(node for node in cluster.worker_nodes if node.node_id != here)
        killed.append(node.node_id)
        kill_node(cluster, node)

    killed = []
    called = disturbed(monkeypatch, kill)
    launch_here(config_of(exact | on(cluster, "killed")))
    assert same(weights(tmp_path, "killed"), expected)
    first, second = started
    assert killed[0] in {unit.node for unit in first.units}
    assert killed[0] not in {unit.node for unit in second.units}
    assert len(second.units) == NODES
    assert 0 < called[0].generated_again < 6  # those of the node, and not those of the other two


def test_a_killed_run_leaves_no_actor_in_the_cluster(exact, tmp_path, cluster):
    settings = exact | on(cluster, "run")
    config = write_config(settings, tmp_path)
    process = subprocess.Popen([sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)], cwd=ROOT)
    try:
        wait_for(lambda: len(steps(tmp_path, "run")) >= 1, "the first step", timeout_s=300)
        assert len(actors(cluster)) == NODES + 1
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: is_left_alone(cluster), "the end of the run's actors", 60)


def test_the_leaders_of_all_training_nodes_fetch_from_the_units(exact, tmp_path, cluster, monkeypatch):
    two = exact | {"parallel.data": 2}
    expected = in_orchestrator(two, tmp_path)
    read = reads(monkeypatch)
    nodes = {"parallel.nodes": 2, "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    node = subprocess.Popen(
        [sys.executable, "-m", "engine.ranks.nodes", str(tmp_path / "nodes"), "--wait", "300"], cwd=ROOT
    )
    try:
        launch_here(config_of(two | nodes | on(cluster, "nodes")))
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()
    assert same(weights(tmp_path, "nodes"), expected)
    assert read == []
