"""Which devices each instance of a node of the rollout pool gets."""

import socket

import pytest

from engine.config import Config, Rollout
from engine.config.recipe import load_config
from engine.errors import BadInput, DeadlineError
from engine.run import vllm_command
from tasks.cluster import rollout_node

ASCEND = "ASCEND_RT_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def built_for(tmp_path, monkeypatch):
    """Stands in for an environment with vLLM for a device: only its marker is read."""
    for variable in (ASCEND, CUDA):
        monkeypatch.delenv(variable, raising=False)

    def build(device):
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python").touch(0o755)
        (tmp_path / vllm_command.MARKER).write_text(f"{device}\n")
        monkeypatch.setenv(vllm_command.PYTHON, str(tmp_path / "bin/python"))

    return build


def vllm(tensor):
    return Config(rollout={"engine": "vllm", "tensor": tensor})


@pytest.mark.parametrize(
    ("device", "given", "tensor", "count", "wanted"),
    [
        ("npu", None, 2, 4, [{ASCEND: "0,1"}, {ASCEND: "2,3"}, {ASCEND: "4,5"}, {ASCEND: "6,7"}]),
        ("npu", "0,1,2,3,4,5,6,7", 4, 2, [{ASCEND: "0,1,2,3"}, {ASCEND: "4,5,6,7"}]),
        ("npu", "4, 5, 6, 7", 2, 2, [{ASCEND: "4,5"}, {ASCEND: "6,7"}]),  # the worker's, not all of the node
        ("cuda", "GPU-a,GPU-b,GPU-c", 1, 2, [{CUDA: "GPU-a"}, {CUDA: "GPU-b"}]),
        ("cpu", None, 1, 3, [{}, {}, {}]),
    ],
)
def test_no_two_instances_of_a_node_share_a_device(device, given, tensor, count, wanted, built_for, monkeypatch):
    built_for(device)
    if given is not None:
        monkeypatch.setenv(ASCEND if device == "npu" else CUDA, given)
    assert rollout_node.own_devices(vllm(tensor), count) == wanted


@pytest.mark.parametrize("given", ["0,1,2", ""])
def test_too_few_devices_are_refused(given, built_for, monkeypatch):
    built_for("npu")
    monkeypatch.setenv(ASCEND, given)
    with pytest.raises(BadInput, match=f"{ASCEND}={given}: 2 instances of rollout.tensor = 2 need 4 devices"):
        rollout_node.own_devices(vllm(2), 2)


def test_a_orchestrator_that_never_answers_is_named():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(DeadlineError, match=rf"no orchestrator answers at {address} within 1 s \(rollout\.timeout_s\)"):
        rollout_node._accompany([], address, Rollout(timeout_s=1.0, wait_s=0.5))


def test_the_embedded_engine_needs_no_devices_and_no_vllm(monkeypatch):
    monkeypatch.setenv(vllm_command.PYTHON, "/nowhere")
    assert rollout_node.own_devices(Config(platform={"device": "npu"}), 2) == [{}, {}]


def test_each_instance_is_started_with_its_own_and_none_of_the_runs(monkeypatch):
    """rollout.devices of the run are on another node."""
    started = []
    monkeypatch.setattr(
        rollout_node, "own_devices", lambda config, count: [{ASCEND: str(number)} for number in range(count)]
    )
    monkeypatch.setattr(
        rollout_node,
        "_instance",
        lambda recipe, join, host, name, environment: started.append(
            (environment, load_config(recipe).rollout.devices)
        ),
    )
    monkeypatch.setattr(rollout_node, "_accompany", lambda children, join, rollout: None)
    monkeypatch.setattr(rollout_node, "stop_all", lambda children, within_s: None)
    rollout_node.serve_until_the_run_ends(Config(rollout={"devices": [0]}), "127.0.0.1:1", 2, "127.0.0.1")
    assert started == [({ASCEND: "0"}, []), ({ASCEND: "1"}, [])]
