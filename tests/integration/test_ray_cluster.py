"""Runs whose instances and trainer nodes Ray places: three Ray nodes on this machine."""

import re
import subprocess
import sys

import pytest

from support.brake import braked, slow_down
from support.ports import two_neighbours
from support.ray_nodes import kill_node, ray_cluster
from support.runs import ROOT, Tree, overrides, wait_for
from support.transferqueue import EXACT, MARKS
from support.whole_runs import run, same, steps, weights

pytestmark = MARKS


@pytest.fixture
def cluster(monkeypatch):
    """The head has room for the first trainer node only."""
    with ray_cluster(monkeypatch, [{"num_cpus": 1}, {"num_cpus": 4}, {"num_cpus": 4}]) as found:
        yield found


@pytest.fixture
def exact(settings):
    return settings | EXACT | {"evaluate.problems": 8, "evaluate.max_new_tokens": 16, "train.mode": "sync"}


def on_ray(exact, cluster, name, **more):
    keys = {"cluster.engine": "ray", "cluster.address": cluster.address, "run.name": name, "rollout.instances": 2}
    return exact | keys | more


class Command:
    """`metronome run` with its output so far."""

    def __init__(self, folder, settings):
        self.file = folder / f"{settings['run.name']}.txt"
        sets = [part for override in overrides(settings) for part in ("--set", override)]
        command = [sys.executable, "-m", "flows.cli", "run", "infra/recipes/quickstart.toml", *sets]
        with self.file.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            tree = Tree(self.process.pid)
            self.process.kill()
            self.process.wait()
            wait_for(lambda: tree.left() == [], "the end of all processes", 30)

    @property
    def output(self):
        return self.file.read_text()

    def wait_for(self, pattern, within_s=400):
        wait_for(lambda: self.process.poll() is not None or re.search(pattern, self.output), pattern, within_s)
        return re.search(pattern, self.output)

    def ends(self):
        assert self.process.wait(600) == 0, self.output


def node_of(cluster, number):
    """The node whose id begins with these digits."""
    (found,) = [node for node in cluster.worker_nodes if node.node_id.startswith(number)]
    return found


def test_an_instance_whose_node_dies_starts_again_elsewhere_and_all_bits_are_those_of_one_machine(
    exact, tmp_path, cluster
):
    exact |= {"train.steps": 6, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    with Command(tmp_path, on_ray(exact, cluster, "ray")) as command:
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 2, "the second step", 400)
        places = re.findall(r"instance-(\d) on \S+ \((\w+)\)", command.output)[-2:]
        assert len({node for _, node in places}) == 2  # they are spread
        number, node = next(place for place in places if not cluster.head_node.node_id.startswith(place[1]))
        slow_down(tmp_path, 5)
        kill_node(cluster, node_of(cluster, node))
        found = command.wait_for(rf"instance-{number} starts on \S+ \((\w+)\)")
        assert found[1] != node
        command.wait_for(rf"instance-{number}-\d has joined")
        slow_down(tmp_path, 0)
        command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_run_whose_trainer_node_dies_resumes_with_the_same_bits(exact, tmp_path, cluster):
    exact |= {"train.steps": 8, "checkpoint.every": 2, "parallel.data": 2, "parallel.nodes": 2}
    alone = exact | {"run.name": "alone", "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    node = subprocess.Popen(
        [sys.executable, "-m", "engine.ranks.nodes", str(tmp_path / "alone"), "--wait", "300"], cwd=ROOT
    )
    try:
        run(alone, tmp_path)
    finally:
        node.kill()
        node.wait()
    with Command(tmp_path, on_ray(exact, cluster, "ray", **{"parallel.rendezvous": "auto"})) as command:
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 3, "the third step", 400)
        lost = re.findall(r"trainer node 1(?:, [^;(]*)? on \S+ \((\w+)\)", command.output)[-1]
        kill_node(cluster, node_of(cluster, lost))
        found = command.wait_for(r"trainer node 1 starts on \S+ \((\w+)\)")
        assert found[1] != lost
        command.wait_for("the previous attempt ended")
        command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_run_without_room_says_what_it_waits_for_and_ends(exact, tmp_path, cluster):
    with Command(tmp_path, on_ray(exact, cluster, "ray", **{"rollout.instances": 20, "cluster.wait_s": 5})) as command:
        assert command.process.wait(300) != 0
    said = r"Ray has no room for instance-0 \(1 CPU\), .*; free are \d+ CPU; waited 5 s \(cluster.wait_s\)"
    assert re.search(said, command.output), command.output
