"""Where the papers' recipes land on a Ray cluster of their size, whose nodes and devices are made up: each process is
replaced by an actor that only registers."""

import time
from collections import Counter

import pytest

from engine.config.placing import bundles_of
from engine.config.recipe import load_config
from support.paper_recipes import DEVICES
from support.ray_nodes import ray_cluster
from support.runs import ROOT
from support.transferqueue import MARKS
from tasks.cluster.ray import parts as ray_parts
from tasks.cluster.ray import placement as placing

pytestmark = [*MARKS, pytest.mark.nightly]
MOST_S = 60.0
"""Longest time in seconds until the largest recipe has its room."""
STARTED = [name for name, devices in DEVICES.items() if sum(devices) <= 64]
"""Recipes whose processes all fit on the machine of this test."""


def stub():
    """A class like `PlacedProcess` that starts nothing. It is made here, so that Ray sends its code to the nodes."""

    class Registered:
        def __init__(self):
            import os

            import ray

            from engine.run.placed_process import ActorPlace
            from engine.run.vllm_command import VISIBLE

            devices = {name: os.environ[name] for name in VISIBLE.values() if os.environ.get(name)}
            context = ray.get_runtime_context()
            self._place = ActorPlace(context.get_node_id(), ray.util.get_node_ip_address(), devices, os.nice(0))

        def place(self):
            return self._place

        def start(self, module, arguments, files, environment):
            return self._place

        def start_with(self, model, module, arguments, files, environment):
            return self._place

        def look(self):
            from engine.run.placed_process import News

            return News(None, b"")

        def stop(self, grace_s):
            return b""

    return Registered


def recipe(name, address):
    sets = ["cluster.engine=ray", f"cluster.address={address}", "cluster.wait_s=300"]
    config = load_config(ROOT / f"infra/recipes/papers/{name}.toml", sets)
    if config.parallel.nodes > 1:
        config = load_config(ROOT / f"infra/recipes/papers/{name}.toml", [*sets, "parallel.rendezvous=auto:29500"])
    return config


def nodes_for(name):
    """Nodes that hold exactly what the paper has."""
    config = recipe(name, "auto")
    kind = {"num_gpus": 8} if name.startswith(("gac", "one-step")) else None
    each = config.platform.devices_per_node
    return [{"num_cpus": 0, **(kind or {"resources": {"NPU": each}})} for _ in range(-(-sum(DEVICES[name]) // each))]


def check_landed(name, config, parts, nodes):
    """Every part is where the layout wants it. `nodes`: Ray's ids of the nodes of the parts, by part."""
    kind = "GPU" if name.startswith(("gac", "one-step")) else "NPU"
    each = config.platform.devices_per_node
    trained = [part for part in parts if part.name.startswith("trainer")]
    sampled = [part for part in parts if part.name.startswith("instance")]
    wanted = bundles_of(config, kind)
    assert [part.amounts for part in trained] == wanted.nodes
    assert [part.amounts for part in sampled] == wanted.instances
    used = Counter()
    for part in parts:
        used[nodes[part]] += part.amounts[kind]
    assert sum(used.values()) == sum(DEVICES[name])
    assert max(used.values()) <= each
    fits = each // config.parallel.ranks_per_node  # trainer nodes on one node of the cluster
    assert len({nodes[part] for part in trained}) == -(-len(trained) // fits)
    there = Counter(nodes[part] for part in sampled)
    assert sum(there.values()) == len(sampled)


@pytest.mark.parametrize("name", STARTED)
def test_each_process_of_a_recipe_lands_where_the_layout_wants_it(name, monkeypatch, tmp_path):
    monkeypatch.setattr(ray_parts, "_Held", stub())
    with ray_cluster(monkeypatch, nodes_for(name)) as cluster:
        config = recipe(name, cluster.address)
        began = time.monotonic()
        with placing.running_on_ray(config, tmp_path) as placed:
            print(f"{name}: {time.monotonic() - began:.1f} s")
            parts = placed.await_nodes.__self__._parts
            check_landed(name, config, parts, {part: part.place.node for part in parts})
            assert parts[0].place.node == cluster.head_node.node_id
            seen = Counter()
            for part in parts:
                (numbers,) = part.place.devices.values()
                assert len(numbers.split(",")) == sum(part.amounts.values())
                seen.update((part.place.node, number) for number in numbers.split(","))
            assert set(seen.values()) == {1}  # nobody shares a device
            assert len(seen) == sum(DEVICES[name])


def test_512_devices_are_placed_in_under_a_minute(monkeypatch, tmp_path):
    name = max(DEVICES, key=lambda name: sum(DEVICES[name]))
    assert sum(DEVICES[name]) == 512
    with ray_cluster(monkeypatch, nodes_for(name)) as cluster:
        config = recipe(name, cluster.address)
        with placing._connected(config.cluster) as here:
            from ray.util.placement_group import placement_group_table

            wanted = bundles_of(config, "NPU")
            nodes = [placing._node(number, amounts, config, tmp_path) for number, amounts in enumerate(wanted.nodes)]
            instances = [
                placing._instance(number, amounts, config, None) for number, amounts in enumerate(wanted.instances)
            ]
            began = time.monotonic()
            placing.take_room(nodes, instances, 300.0, here, run="asyncflow")
            took_s = time.monotonic() - began
            print(f"{name}: {took_s:.2f} s")
            parts = [*nodes, *instances]
            tables = {part.group.id: placement_group_table(part.group)["bundles_to_node_id"] for part in parts}
            landed = {part: tables[part.group.id][part.bundle] for part in parts}
            check_landed(name, config, parts, landed)
            assert landed[nodes[0]] == cluster.head_node.node_id
            assert len(set(landed.values())) == 32
            placing.give_back(parts)
    assert took_s < MOST_S
