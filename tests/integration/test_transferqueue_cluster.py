"""Runs whose columns lie in TransferQueue's units on the nodes of a Ray cluster: three nodes on this machine."""

import pytest

from engine.errors import StoreError
from engine.orchestrator.launch import launch_run as launch_here
from support.ray_nodes import kill_node, ray_cluster
from support.runs import config_of, wait_for
from support.transferqueue import ELSEWHERE, EXACT, MARKS, disturbed
from support.whole_runs import orchestrating, run, same, steps, weights

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
    lived = []
    disturbed(monkeypatch, lambda store: lived.extend(actors(cluster)))
    launch_here(config_of(exact | on(cluster, "cluster")))
    assert same(weights(tmp_path, "cluster"), expected)
    nodes = {node["NodeID"] for node in cluster.global_state.node_table()}
    assert {node for kind, node in lived if kind == "SimpleStorageUnit"} == nodes
    assert len(lived) == NODES + 1
    wait_for(lambda: is_left_alone(cluster), "the end of the run's actors", 30)


def test_the_loss_of_a_node_ends_the_run_by_name_and_the_run_resumes_on_those_that_live(
    exact, tmp_path, cluster, monkeypatch
):
    expected = in_orchestrator(exact, tmp_path)

    def kill(store):
        here = next(node for kind, node in actors(cluster) if kind == "TransferQueueController")
        kill_node(cluster, next(node for node in cluster.worker_nodes if node.node_id != here))

    disturbed(monkeypatch, kill)
    config = config_of(exact | on(cluster, "killed"))
    with pytest.raises(StoreError, match="TransferQueue was asked to return the columns"):
        launch_here(config)
    monkeypatch.undo()
    launch_here(config, resume=True)
    assert same(weights(tmp_path, "killed"), expected)


def test_a_killed_run_leaves_no_actor_in_the_cluster(exact, tmp_path, cluster):
    settings = exact | on(cluster, "run")
    with orchestrating(settings, tmp_path):
        wait_for(lambda: len(steps(tmp_path, "run")) >= 1, "the first step", timeout_s=300)
        assert len(actors(cluster)) == NODES + 1
    wait_for(lambda: is_left_alone(cluster), "the end of the run's actors", 60)
