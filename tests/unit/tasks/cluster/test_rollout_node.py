"""Which devices each instance of a node of the rollout pool gets."""

import socket
import sys

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


def test_each_instance_is_started_with_its_own_devices_and_none_of_the_runs(monkeypatch, tmp_path):
    """rollout.devices of the run are on another node. Each instance is a program that notes what it was given."""
    code = "import os, sys, shutil; recipe = sys.argv[sys.argv.index('serve') + 1]; "
    code += f"shutil.copy(recipe, '{tmp_path}/' + os.environ['NUMBER'] + '.toml')"
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{code}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(rollout_node.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(rollout_node, "own_devices", lambda config, count: [{"NUMBER": str(n)} for n in range(count)])
    config = Config(rollout={"devices": [0], "timeout_s": 3.0, "wait_s": 3.0})
    with pytest.raises(DeadlineError):
        rollout_node.serve_until_the_run_ends(config, "127.0.0.1:1", 2, "127.0.0.1")
    assert [load_config(tmp_path / f"{number}.toml").rollout.devices for number in range(2)] == [[], []]
