"""The benchmarks of the training engine, at sizes of seconds: that they run, and how their figures hang together."""

import json
import subprocess
import sys

import pytest

from support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def figures(name, *arguments):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    return json.loads(last.removeprefix("RESULT "))


def test_device_on_a_cpu():
    found = figures("device", "--device", "cpu", "--tiny")
    assert found["device"] == "CPU"
    errors = {(one["what"], one["dtype"]): max(one["errors"].values()) for one in found["correctness"]}
    assert 0 < errors["model, gradients", "float32"] <= 1e-4
    assert errors["model, log-probabilities", "float32"] < errors["model, log-probabilities", "bfloat16"] <= 0.02
    assert 0 < errors["attention cpu", "float32"] < errors["attention cpu", "bfloat16"] <= 0.02


def test_launches():
    found = figures("launches")
    assert found["syncs_per_window"] == 1  # the host waits for the device once: for all figures of the window together
    assert found["syncs_per_update"] == 2  # whether the gradient is finite, and its norm
    assert 0 < found["operators_per_layer"] <= 60
    assert 0 < found["bytes_per_layer_and_token"] < 224_000
    assert found["operators_per_window"] > 2 * 2 * found["operators_per_layer"]
    assert found["operators_per_update"] > 0


@pytest.mark.nightly
def test_data_plane():
    small = ("--prompts", "4", "--group", "8", "--length", "8192", "--steps", "1", "--repeats", "1")
    found = figures("data_plane", *small, "--against", ".")
    ours = found["this checkout"]
    other = found["other checkout"]
    assert 9 < ours["queue_bytes_per_token"] == other["queue_bytes_per_token"] < 12  # ids, log-probabilities and masks
    assert found["times_the_tokens_per_cpu_s"] == pytest.approx(ours["tokens_per_cpu_s"] / other["tokens_per_cpu_s"])
    assert ours["verifier_us_per_token"] > 0


@pytest.mark.nightly
def test_balance():
    small = ("--hidden", "64", "--layers", "1", "--prompts", "24", "--steps", "6", "--stages", "2")
    found = figures("balance", *small)
    idle = found["idle"]["2 stages, sync"]
    assert idle["together"]["windows"] < idle["apart"]["windows"]
    assert idle["together"]["idle"] < idle["apart"]["idle"]
    assert found["measured"]["speed_up"] > 0
    assert 0 <= found["measured"]["guided"]["imbalance"] < 1  # two replicas: 1 is a replica that gets nothing
    for case in found["simulated"].values():
        assert case["guided"]["step_s"] > 0
    two = found["simulated"]["2 replica groups"]
    assert two["guided"]["imbalance"] < two["greedy"]["imbalance"] < 0.03


@pytest.mark.nightly
def test_weight_sync():
    found = figures("weight_sync", "--tiny", "--rounds", "1", "--transports", "gloo", "--instances", "1")
    layer = 256 * 128 * (16 + 8 + 8 + 16) + 3 * 256 * 768 + 2 * 256 + 2 * 128  # attention, MLP, norms, head norms
    assert found["parameters"] == 40000 * 256 + 6 * layer + 256
    for name in ("gloo_1", "gloo_1_staged"):
        assert found[name]["GB"] == pytest.approx(4 * found["parameters"] / 1e9)
        assert found[name]["ratio"] == pytest.approx(found[name]["sync_s"] / found[name]["bare_s"])
