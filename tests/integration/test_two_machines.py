"""The papers' recipes on two machines, which two network namespaces stand for: with the addresses that they ship, and
a tiny model in place of theirs. Each makes its first step with every process where its layout has it."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from engine.config.recipe import load_config
from engine.run.files import read_lines
from support.commands import sets
from support.paper_recipes import DEVICES
from support.runs import ROOT, overrides

pytestmark = [pytest.mark.timeout(400)]
FIRST = "one-step-off-qwen2.5-math-7b"
"""Has trainer nodes, an instance of its own and one that joins."""
ENDS_S = 300
NAME = f"metronome-two-{os.getpid()}"
NETWORK = f"10.217.{os.getpid() % 250}"
HERE, THERE = (f"{NETWORK}.{number}" for number in (1, 2))
NODES = {HERE: f"{NAME}-a", THERE: f"{NAME}-b"}


def ip(command):
    return subprocess.run(["ip", *command.split()], capture_output=True, timeout=30).returncode == 0


def connected():
    """Make both machines and the line between them. Whether this process may."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    a, b = NODES.values()
    pairs = ((a, "mta", HERE, THERE), (b, "mtb", THERE, HERE))
    steps = [f"netns add {a}", f"netns add {b}", f"link add mta netns {a} type veth peer name mtb netns {b}"]
    for node, device, own, other in pairs:
        steps += [f"-n {node} addr add {own}/30 dev {device}", f"-n {node} link set lo up"]
        steps += [f"-n {node} link set {device} up", f"-n {node} route add default via {other}"]
    return all(map(ip, steps))


@pytest.fixture(scope="module")
def machines():
    try:
        if not connected():
            pytest.skip("network namespaces need root and the command ip")
        yield
    finally:
        for node in NODES.values():
            ip(f"netns delete {node}")


def tiny(recipe, model, problems, folder):
    """The recipe's keys that make it small. What it says of addresses, modes, losses and who joins stays."""
    nodes = min(2, recipe.parallel.nodes)
    weights = {"weights.transport": "gloo"} if recipe.weights.transport in ("nccl", "hccl") else {}
    layout = {"parallel.data": nodes, "parallel.nodes": nodes, "parallel.sequence": False}
    layout |= {f"parallel.{key}": 1 for key in ("tensor", "pipeline", "context")}
    instances = {
        "rollout.instances": min(1, recipe.rollout.instances),
        "dry_run.joining": min(1, recipe.dry_run.joining),
    }
    prompts = {
        "data.heldout_fraction": 0.2,
        "data.prompt_template": "{problem}",
        "data.instruction": "",
        "data.chat_template_kwargs": "{}",
    }
    places = {"model.path": model, "data.train": problems, "run.output": folder, "run.name": "run"}
    small = {"rollout.group_size": 2, "rollout.max_new_tokens": 8, "rollout.max_context": 64, "rollout.concurrency": 2}
    small |= {"train.prompts_per_step": 4, "train.updates": 1, "train.warmup_steps": 0, "train.micro_batch_tokens": 64}
    small |= {"train.steps": 1, "train.dtype": "float32", "model.dtype": "float32", "algorithm.overlong_buffer": 0}
    small |= {"reward.workers": 1, "evaluate.benchmark": "", "evaluate.every": 0, "evaluate.max_context": 0}
    devices = {"platform.device": "cpu", "platform.devices": 0, "rollout.devices": "[]", "rollout.tensor": 1}
    return overrides(
        {"rollout.engine": "embedded", **devices, **weights, **layout, **instances, **prompts, **places, **small}
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == FIRST else pytest.mark.nightly) for name in sorted(DEVICES)],
)
def test_a_paper_recipe_makes_its_first_step_with_its_own_addresses(machines, tiny_model, problems, tmp_path, name):
    recipe = f"infra/recipes/papers/{name}.toml"
    keys = tiny(load_config(recipe), tiny_model, problems, tmp_path)
    config = load_config(recipe, keys)
    environment = {**os.environ, "METRONOME_TOKEN": "secret", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def start(address, *command):
            """Start a process on a machine. It is ended with the test."""
            log = stack.enter_context((tmp_path / f"{len(started)}.log").open("wb"))
            inside = ["ip", "netns", "exec", NODES[address], sys.executable, "-m", *map(str, command)]
            process = subprocess.Popen(inside, cwd=ROOT, env=environment, stdin=-3, stdout=log, stderr=log)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            started.append(process)
            return process

        started = []
        run = start(HERE, "flows.cli", "train", recipe, *sets(*keys))
        if config.dry_run.joining:
            joined = ["--join", f"{HERE}:7000", "--host", THERE]
            start(THERE, "flows.cli", "serve", recipe, *sets(*keys), *joined)
        if config.parallel.nodes > 1:
            start(THERE, "engine.trainer.ranks.nodes", tmp_path / "run", "--wait", ENDS_S)
        deadline = time.monotonic() + ENDS_S
        while run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        told = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
        assert run.poll() == 0, told
    (step,) = read_lines(tmp_path / "run/steps.jsonl")
    assert step["pool_size"] == config.rollout.instances + config.dry_run.joining
