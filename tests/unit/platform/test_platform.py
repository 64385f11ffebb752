import importlib
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine import platform
from engine.config import Config
from engine.errors import BadInput
from engine.platform import npu
from engine.platform.cpu import Cpu
from engine.platform.cuda import Cuda
from engine.platform.npu import Npu
from engine.trainer import rank
from support.runs import ROOT


def test_auto_is_the_cpu_where_there_is_nothing_else():
    assert platform.get_platform("auto").name == "cpu"
    assert platform.get_platform().device(3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "reason"), [("cuda", "without CUDA"), ("npu", "torch_npu is not installed"), ("tpu", "expected auto, cpu")]
)
def test_a_platform_that_is_not_there_is_refused_with_the_reason(name, reason, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(BadInput, match=reason):
        platform.get_platform(name)


def test_a_rank_without_a_device_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(
        BadInput, match=f"rank {count} of this machine has no cuda device: there are {count}; use fewer"
    ):
        Cuda().device(count)


def test_auto_chooses_an_npu_first_and_then_asks_for_mindspeed_and_what_that_imports(monkeypatch):
    there = {"torch_npu"}
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: True if name in there else None)
    monkeypatch.setattr(Npu, "api", lambda self: SimpleNamespace(is_available=lambda: True))
    with pytest.raises(BadInput, match="the package mindspeed .* is not installed"):
        platform.get_platform("auto")
    there |= {"mindspeed", "triton"}
    with pytest.raises(BadInput, match="mindspeed can't be imported without the modules einops"):
        platform.get_platform("auto")
    there.add("einops")
    assert platform.get_platform("auto").name == "npu"


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="glibc's")
def test_a_rank_on_a_cpu_gets_no_new_pages_for_each_large_tensor():
    """By the page faults of twenty tensors of 64 MiB after others, before and after memory is kept."""
    code = (
        "import resource, torch; from engine.platform.cpu import Cpu; "
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "fill = lambda: any(torch.ones(2**24) is None for _ in range(20)); "
        "more = lambda: (fill(), -faults(), fill(), faults()); "
        "print(sum(more()[1::2]) > 100_000, Cpu().set_device(0), sum(more()[1::2]) > 100_000)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True cpu False", done.stderr


def test_importing_the_platforms_imports_no_vendor_package():
    code = (
        "import engine.platform, sys; "
        "print([m for m in ('torch_npu', 'mindspeed', 'megatron.core') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_npu_without_cann_is_said_in_our_words(tmp_path):
    """torch imports what an entry point torch.backends names, and raises if that fails. Our processes ask it not to,
    so that the platform's own message is reached."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text('raise ImportError("libascendcl.so: cannot open")\n')
    info = tmp_path / "torch_npu-2.10.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.10.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    env = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    code = "from engine import platform; platform.get_platform('npu')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "(libascendcl.so: cannot open); is CANN's environment set up?" in done.stderr.splitlines()[-1]


def test_mindspeed_does_not_see_our_command_line(monkeypatch):
    seen = []
    imported = importlib.import_module

    def vendors(name, package=None):
        if not name.startswith(("torch_npu", "mindspeed")):  # torch loads parts of itself so
            return imported(name, package)
        return seen.append((name, list(sys.argv)))

    monkeypatch.setattr(npu.importlib, "import_module", vendors)
    monkeypatch.setattr(sys, "argv", ["rank.py", "--folder", "x"])
    Npu().adapt_megatron()
    assert seen == [("torch_npu", ["rank.py", "--folder", "x"]), ("mindspeed.megatron_adaptor", ["rank.py"])]
    assert sys.argv == ["rank.py", "--folder", "x"]


def test_all_random_streams_come_back():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    cpu = platform.get_platform("cpu")

    def draw():
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        return random.random(), torch.rand(3), inside

    with platform.single_session(cpu, seed=5):
        state = cpu.rng_state()
        assert set(state) == {
            "python",
            "cpu",
            *(f"megatron.{name}-parallel-rng" for name in ("data", "model", "expert")),
        }
        assert all(stream.dtype is torch.uint8 and stream.dim() == 1 for stream in state.values())
        state = {name: stream.clone() for name, stream in state.items()}
        first = draw()
        assert not torch.equal(draw()[2], first[2])  # Megatron's stream goes on
        cpu.set_rng_state(state)
        again = draw()
        assert again[0] == first[0]
        assert torch.equal(again[1], first[1])
        assert torch.equal(again[2], first[2])
        assert not torch.equal(first[1], first[2])
        with pytest.raises(BadInput, match="streams"):
            cpu.set_rng_state({"cpu": state["cpu"]})


def test_a_session_starts_the_same_streams_for_the_same_seed():
    draws = []
    for seed in (7, 7, 8):
        with platform.single_session(platform.get_platform("cpu"), seed):
            draws.append((random.random(), *torch.rand(2).tolist()))
    assert draws[0] == draws[1]
    assert not set(draws[0]) & set(draws[2])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 2},
            r"parallel\.tensor 2 × parallel\.pipeline 1 × parallel\.context 1 = 2 does not divide the 1 ranks",
        ),
        ({"expert": 3}, r"parallel\.expert 3 = 3 does not divide"),
    ],
)
def test_ranks_that_can_not_be_divided_so(sizes, message, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(BadInput, match=message):
        with platform.parallel_session(platform.get_platform("cpu"), 0, **sizes):
            pass
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Cpu(), {}),
        (Cuda(), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Tree"}),
        (Npu(), {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"}),
    ],
)
def test_a_device_is_made_deterministic_before_it_is_used(machine, expected, monkeypatch):
    names = ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Tree")  # the user's own
    chosen = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    seen = {}
    monkeypatch.setattr(platform, "get_platform", lambda name: machine)
    monkeypatch.setattr(platform, "parallel_session", lambda *given, **sizes: seen.update(os.environ))
    rank._session(Config().model_copy(update={"train": Config().train.model_copy(update={"deterministic": True})}))
    found = {name: seen.get(name) for name in expected} | {name: seen[name] for name in names if name in seen}
    assert found == expected
    assert chosen == ([] if machine.name == "cpu" else [True])
    chosen.clear()
    rank._session(Config())
    assert chosen == []
