"""Runs whose instances and trainer nodes Ray places: three Ray nodes on this machine."""

import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import BadInput, DeadlineError
from engine.run.folder import RunFolder
from engine.run.vllm_command import PYTHON
from support.brake import braked, slow_down
from support.ports import two_neighbours
from support.ray_nodes import kill_node, kill_tree, node_without, ray_cluster, redis_server, started_cluster
from support.runs import ROOT, Tree, config_of, overrides, wait_for
from support.transferqueue import ELSEWHERE, EXACT, MARKS
from support.whole_runs import run, same, steps, weights
from tasks.cluster.ray import placement as ray_cluster_of
from tasks.cluster.ray.models import PlacedModel, find_digests, model_here
from tasks.cluster.ray.parts import MODEL, PlacedPart, begin, end, first_place, give_back, take_room

pytestmark = MARKS
NEEDS_ROOT = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-fp", "--mount-proc", "true"], check=False).returncode,
    reason="only root may hide folders and processes from a process",
)
NEEDS_REDIS = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="no redis-server here (Debian's package of this name)"
)


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


def on_cluster(cluster):
    return {"cluster.engine": "ray", "cluster.address": cluster.address}


class Command:
    """`metronome run` with its output so far."""

    def __init__(self, folder, settings, *more, before=()):
        """`before`: what the command begins with."""
        self.file = folder / f"{settings['run.name']}.txt"
        sets = [part for override in overrides(settings) for part in ("--set", override)]
        command = [*before, sys.executable, "-m", "flows.cli", "run", "infra/recipes/quickstart.toml", *sets, *more]
        self.layers = 1 + bool(before)
        with self.file.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            tree = Tree(self.process.pid)
            for process in tree.processes[: self.layers]:
                process.kill()
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


def run_on_two_nodes(settings, folder):
    """Train with two trainer nodes that are started by hand, as the run "alone"."""
    alone = settings | {"run.name": "alone", "parallel.rendezvous": f"127.0.0.1:{two_neighbours()}"}
    node = subprocess.Popen(
        [sys.executable, "-m", "engine.trainer.ranks.nodes", str(folder / "alone"), "--wait", "300"], cwd=ROOT
    )
    try:
        run(alone, folder)
    finally:
        node.kill()
        node.wait()


def test_all_kinds_of_processes_are_placed_and_all_bits_are_those_without_ray(exact, tmp_path, monkeypatch):
    """Two trainer nodes, three instances, ranks of the reference, storage units."""
    exact |= {"train.steps": 4, "parallel.data": 2, "parallel.nodes": 2, "stages.reference.tensor": 1}
    run_on_two_nodes(exact | {"rollout.instances": 3}, tmp_path)
    with ray_cluster(monkeypatch, [{"num_cpus": 2}, {"num_cpus": 2}, {"num_cpus": 2}]) as cluster:
        stored = ELSEWHERE | {"queue.address": cluster.address}
        keys = {"rollout.instances": 3, "parallel.rendezvous": "auto:29500"} | stored
        with Command(tmp_path, on_ray(exact, cluster, "ray", **keys)) as command:
            command.ends()
    told = [line for line in command.output.splitlines() if "trainer node 0" in line][-1]
    for name in ("trainer node 1", "instance-0", "instance-1", "instance-2"):
        assert name in told
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_run_whose_trainer_node_dies_resumes_with_the_same_bits(exact, tmp_path, cluster):
    exact |= {"train.steps": 8, "checkpoint.every": 2, "parallel.data": 2, "parallel.nodes": 2}
    run_on_two_nodes(exact, tmp_path)
    with Command(tmp_path, on_ray(exact, cluster, "ray", **{"parallel.rendezvous": "auto:29500"})) as command:
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 3, "the third step", 400)
        lost = re.findall(r"trainer node 1(?:, [^;(]*)? on \S+ \((\w+)\)", command.output)[-1]
        kill_node(cluster, node_of(cluster, lost))
        found = command.wait_for(r"trainer node 1 starts on \S+ \((\w+)\)")
        assert found[1] != lost
        command.wait_for("the previous attempt ended")
        command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_node_with_an_instance_and_a_storage_unit_dies_and_all_bits_are_those_of_one_machine(
    exact, tmp_path, cluster
):
    exact |= {"train.steps": 6, "train.timeout_s": 120, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    stored = ELSEWHERE | {"queue.address": cluster.address}
    with Command(tmp_path, on_ray(exact, cluster, "ray", **stored)) as command:
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 2, "the second step", 400)
        places = re.findall(r"(instance-\d) on \S+ \((\w+)\)", command.output)[-2:]
        node = next(node for _, node in places if not cluster.head_node.node_id.startswith(node))
        slow_down(tmp_path, 2)
        kill_node(cluster, node_of(cluster, node))
        command.wait_for("the previous attempt ended")
        slow_down(tmp_path, 0)
        command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_run_without_its_head_ends_with_one_error_and_resumes_on_another_cluster_with_the_same_bits(
    exact, tmp_path, monkeypatch
):
    exact |= {"train.steps": 8, "checkpoint.every": 2, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    with started_cluster(monkeypatch, [1, 4]) as first:
        with Command(tmp_path, on_ray(exact, first, "ray")) as command:
            wait_for(lambda: len(steps(tmp_path, "ray")) >= 3, "the third step", 400)
            slow_down(tmp_path, 8)
            own = Tree(command.process.pid)
            other = Tree(first.nodes[1].pid)
            lost = kill_tree(first.nodes[0])
            began = time.monotonic()
            assert command.process.wait(300) == 1, command.output
            ended_s = time.monotonic() - began
            assert own.left() == []
            assert [line for tree in (other, lost) for _, line in tree.command_lines() if "engine." in line] == []
            print(f"the run ended after {ended_s:.1f} s")
            wait_for(lambda: not [1 for _, line in other.command_lines() if "_Held" in line], "the actors' end", 120)
            print(f"all actors ended after {time.monotonic() - began:.1f} s")
    (told,) = re.findall(r"(?m)^error: .*", command.output)
    assert re.search(r"Ray's (head|node on this machine) \(\S+\) has not answered .*: resume the run", told)
    assert len(steps(tmp_path, "ray")) < 8
    slow_down(tmp_path, 0)
    with started_cluster(monkeypatch, [1, 4]) as second:
        with Command(tmp_path, on_ray(exact, second, "ray"), "--resume") as command:
            command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


def test_a_head_that_stands_still_does_not_answer(monkeypatch):
    with ray_cluster(monkeypatch, [{"num_cpus": 1}]) as cluster:
        (head,) = cluster.head_node.all_processes["gcs_server"]
        with ray_cluster_of._connected(config_of(on_cluster(cluster)).cluster) as here:
            needed = ray_cluster_of._needed(here)
            assert [one.wait_s for one in needed] == [0.0, 0.0]  # it has no Redis
            assert all(one.answers() for one in needed)
            head.process.send_signal(signal.SIGSTOP)
            try:
                assert [one.answers() for one in needed] == [False, True]
            finally:
                head.process.send_signal(signal.SIGCONT)
            wait_for(needed[0].answers, "an answer", 60)


@NEEDS_ROOT
@NEEDS_REDIS
def test_a_run_goes_on_while_a_head_with_redis_dies_and_comes_back_and_has_the_bits_of_one_machine(
    exact, tmp_path, monkeypatch
):
    exact |= {"train.steps": 8, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    monkeypatch.setenv(ray_cluster_of.RECONNECT, "300")
    with (
        redis_server() as redis,
        started_cluster(monkeypatch, [0, 3], apart=True, RAY_REDIS_ADDRESS=redis) as cluster,
        Command(tmp_path, on_ray(exact, cluster, "ray"), before=cluster.on(1)) as command,
    ):
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 2, "the second step", 400)
        slow_down(tmp_path, 5)
        kill_tree(cluster.nodes[0])
        began = time.monotonic()
        before = len(steps(tmp_path, "ray"))
        assert command.wait_for("Ray's head .* the run goes on without it for up to 180 s")
        wait_for(lambda: len(steps(tmp_path, "ray")) > before + 1, "a step without a head", 100)
        time.sleep(max(0.0, began + 30.0 - time.monotonic()))
        assert len(steps(tmp_path, "ray")) < 8
        cluster.start_head()
        assert command.wait_for(r"Ray's head \S+ is back after (\d+) s")
        served = [one for one in Tree(cluster.nodes[1].pid).processes if "engine.instance.embedded" in one.cmdline()]
        served[0].kill()
        assert command.wait_for(r"instance-(\d)-1 has joined")  # by an actor of which the new head knows
        slow_down(tmp_path, 0)
        command.ends()
    assert "the previous attempt ended" not in command.output
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))


@NEEDS_ROOT
@NEEDS_REDIS
def test_a_run_whose_head_never_returns_ends_before_the_nodes_of_ray_do(exact, tmp_path, monkeypatch):
    exact |= {"train.steps": 8, "reward.function": braked(tmp_path, 0)}
    monkeypatch.setenv(ray_cluster_of.RECONNECT, "120")
    with (
        redis_server() as redis,
        started_cluster(monkeypatch, [0, 3], apart=True, RAY_REDIS_ADDRESS=redis) as cluster,
        Command(tmp_path, on_ray(exact, cluster, "ray"), before=cluster.on(1)) as command,
    ):
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 2, "the second step", 400)
        slow_down(tmp_path, 9)
        own = Tree(command.process.pid)
        kill_tree(cluster.nodes[0])
        began = time.monotonic()
        assert command.wait_for("Ray's head .* the run goes on without it for up to 60 s")
        assert command.process.wait(300) == 1, command.output
        print(f"the run ended after {time.monotonic() - began:.1f} s")
        assert own.left() == []
    (told,) = re.findall(r"(?m)^error: .*", command.output)
    assert re.search(r"Ray's head \(\S+\) has not answered \d+ times in \d+ s, .*: resume the run", told)


def test_a_second_run_waits_for_the_room_of_the_first_and_both_have_the_bits_of_one_machine(
    exact, tmp_path, monkeypatch
):
    exact |= {"train.steps": 6, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    with ray_cluster(monkeypatch, [{"num_cpus": 3}]) as cluster:
        with Command(tmp_path, on_ray(exact, cluster, "first")) as first:
            wait_for(lambda: len(steps(tmp_path, "first")) >= 1, "the first step", 400)
            slow_down(tmp_path, 5)
            with Command(tmp_path, on_ray(exact, cluster, "second")) as second:
                wants = r"instance-0 \(1 CPU\), instance-1 \(1 CPU\)"
                second.wait_for(rf"no room for {wants}; free are no devices; room is held by first; the run waits")
                assert len(steps(tmp_path, "first")) < 6
                slow_down(tmp_path, 0)
                first.ends()
                second.ends()
    for name in ("first", "second"):
        assert same(weights(tmp_path, name), weights(tmp_path, "alone"))


def test_a_run_without_room_says_what_it_waits_for_and_ends(exact, tmp_path, cluster):
    with Command(tmp_path, on_ray(exact, cluster, "ray", **{"rollout.instances": 20, "cluster.wait_s": 5})) as command:
        assert command.process.wait(300) != 0
    said = r"Ray has no room for instance-0 \(1 CPU\), .*; free are \d+ CPU; waited 5 s \(cluster.wait_s\)"
    assert re.search(said, command.output), command.output


def test_a_run_takes_instances_as_the_cluster_grows_and_all_bits_stay(exact, tmp_path, monkeypatch):
    exact |= {"train.steps": 5, "reward.function": braked(tmp_path, 0)}
    run(exact | {"run.name": "alone"}, tmp_path)
    keys = {"rollout.instances": 1, "cluster.most_instances": 3}
    with ray_cluster(monkeypatch, [{"num_cpus": 2}]) as cluster:
        with Command(tmp_path, on_ray(exact, cluster, "ray", **keys)) as command:
            wait_for(lambda: len(steps(tmp_path, "ray")) >= 1, "the first step", 400)
            slow_down(tmp_path, 5)
            training = r"(?s)\ntrain +\.\.\.\n.*"  # the evaluation before it has more room
            assert not re.search(rf"{training}instance-1", command.output)
            grown = cluster.add_node(num_cpus=8, object_store_memory=80_000_000)
            for number in (1, 2):
                found = command.wait_for(rf"{training}instance-{number} starts on \S+ \((\w+)\)")
                assert grown.node_id.startswith(found[1])
                assert command.wait_for(rf"{training}instance-{number} has joined")
            slow_down(tmp_path, 0)
            command.ends()
    assert "instance-3" not in command.output
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))
    logs = {log.name: log.read_text() for log in (tmp_path / "ray/logs").glob("instance-*.log")}
    assert logs.keys() >= {"instance-0.log", "instance-1.log", "instance-2.log"}


def test_a_run_goes_on_with_the_trainer_nodes_that_are_left(exact, tmp_path, monkeypatch):
    exact |= {"train.steps": 6, "checkpoint.every": 2, "parallel.data": 2, "parallel.nodes": 2}
    keys = {"rollout.instances": 1, "parallel.rendezvous": "auto:29500", "cluster.least_nodes": 1, "cluster.wait_s": 30}
    with ray_cluster(monkeypatch, [{"num_cpus": 1}] * 3) as cluster:
        with Command(tmp_path, on_ray(exact, cluster, "ray", **keys)) as command:
            wait_for(lambda: len(steps(tmp_path, "ray")) >= 3, "the third step", 400)
            lost = re.findall(r"trainer node 1 on \S+ \((\w+)\)", command.output)[-1]
            kill_node(cluster, node_of(cluster, lost))
            command.wait_for(r"goes on with parallel.nodes = 1 and parallel.data = 1 \(cluster.least_nodes\)")
            command.ends()
    assert "raylet" not in command.output
    assert [row["step"] for row in steps(tmp_path, "ray")] == [*range(6)]
    assert RunFolder(tmp_path / "ray").read_config().parallel.nodes == 1


@NEEDS_ROOT
def test_an_instance_that_sees_neither_model_nor_run_folder_has_the_bits_of_one_machine(
    exact, tmp_path, tmp_path_factory, tiny_model, monkeypatch
):
    exact |= {"train.steps": 5, "reward.function": braked(tmp_path, 0), "weights.transport": "gloo"}
    run(exact | {"run.name": "alone"}, tmp_path)
    cache = tmp_path_factory.mktemp("cache")
    with (
        ray_cluster(monkeypatch, [{"num_cpus": 1}]) as cluster,
        node_without(cluster, [tmp_path, tiny_model], cache) as node,
        Command(tmp_path, on_ray(exact, cluster, "ray", **{"rollout.instances": 1})) as command,
    ):
        wait_for(lambda: len(steps(tmp_path, "ray")) >= 2, "the second step", 400)
        assert list(Path(f"/proc/{node.pid}/root{tmp_path}").iterdir()) == []
        slow_down(tmp_path, 5)
        served = [one for one in Tree(node.pid).processes if "engine.instance.embedded" in one.cmdline()]
        served[0].kill()
        command.wait_for(r"instance-0-1 has joined")  # it has loaded a snapshot
        slow_down(tmp_path, 0)
        command.ends()
    assert same(weights(tmp_path, "ray"), weights(tmp_path, "alone"))
    copies = [find_digests(copy) for copy in (cache / "metronome/models").iterdir() if copy.is_dir()]
    assert find_digests(tiny_model) in copies
    assert find_digests(tmp_path / "ray/policy") in copies  # of the last evaluation
    assert len(copies) == 2


def test_a_run_that_waits_names_the_run_that_has_the_room_and_gets_it_afterwards(monkeypatch):
    with ray_cluster(monkeypatch, [{"num_cpus": 2}]) as cluster:
        with ray_cluster_of._connected(config_of(on_cluster(cluster)).cluster) as here:
            first, second = ([PlacedPart("instance-0", {"CPU": 2.0}, module="flows.cli")] for _ in range(2))
            take_room([], first, 60.0, here, run="first")
            said = r"no room for instance-0 \(2 CPU\); free are no devices; room is held by first; waited 2 s"
            with pytest.raises(DeadlineError, match=said):
                take_room([], second, 2.0, here, run="second")
            give_back(first)
            take_room([], second, 60.0, here, run="second")
            give_back(second)


def test_nodes_without_vllm_are_named_before_a_run_begins(monkeypatch, capsys):
    check = ray_cluster_of.check_cluster.__wrapped__
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    with ray_cluster(monkeypatch, [{"num_cpus": 1}]) as cluster:
        named = config_of(on_cluster(cluster)).cluster
        with pytest.raises(BadInput, match=r"no node .* with CPU can run instances; .*/nowhere/python: there is no"):
            check(named, "cpu", "vllm")
        check(named, "cpu", "embedded")
        monkeypatch.setenv(PYTHON, sys.executable)
        cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
        check(named, "cpu", "vllm")
        head = cluster.head_node.node_id
    warned = re.findall(r"warning: no instance can run on \S+ \((\w+)\): \S+=/nowhere/python", capsys.readouterr().err)
    assert len(warned) == 1
    assert head.startswith(warned[0])


def test_a_node_without_the_model_fetches_it_through_ray_also_after_its_source_has_died(
    monkeypatch, tmp_path, tiny_model
):
    with ray_cluster(monkeypatch, [{"num_cpus": 1}]) as cluster:
        import ray  # which reads the token

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cluster.add_node(num_cpus=4, object_store_memory=80_000_000)
        with ray_cluster_of._connected(config_of(on_cluster(cluster)).cluster) as here:
            model = PlacedModel.of(tiny_model, here.node)
            far = replace(model, folder=str(tmp_path / "not there"))
            part = PlacedPart("instance-0", {"CPU": 2.0}, "http.server", ["--directory", MODEL, "0"], model=far)
            take_room([], [part], 60.0, here, run="far")
            for _ in range(2):
                begin(part)
                assert first_place(part, 120.0).node != here.node
                end([part], tmp_path, grace_s=0.0)
                (copy,) = [one for one in (tmp_path / "metronome/models").iterdir() if one.is_dir()]
                assert find_digests(copy) == find_digests(tiny_model) != {}
                shutil.rmtree(copy)
                ray.kill(model.source, no_restart=False)  # as the kernel does where memory is short
            give_back([part])


def test_a_fetch_goes_on_while_the_actor_that_sends_the_model_dies(monkeypatch, tmp_path, tiny_model):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    killed = []
    with ray_cluster(monkeypatch, [{"num_cpus": 1}]) as cluster:
        import ray  # which reads the token

        with ray_cluster_of._connected(config_of(on_cluster(cluster)).cluster) as here:
            model = PlacedModel.of(tiny_model, here.node)

            def read(name, offset):
                if len(killed) < 2:
                    killed.append(name)
                    ray.kill(model.source, no_restart=False)
                return model._piece(name, offset)

            place, held = model_here("gone", model.digests, read)
            with held:
                assert find_digests(place) == model.digests
    assert len(killed) == 2
