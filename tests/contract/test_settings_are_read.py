"""Libraries accept settings and ignore them (vllm-ascend 0.23: --logprobs-mode). So whatever is given to vLLM,
vllm-ascend, Megatron, torch and torch_npu is read somewhere in the release that Metronome is written for. MindSpeed is
given nothing: its adaptor runs with its defaults.

A setting that is not read must have a check at the start that it had its effect; such are named here with the check.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import huggingface_hub
import megatron.core
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.transformer import TransformerConfig

from engine.instance.vllm import logprob_check, serve
from engine.platform.cuda import Cuda
from engine.platform.npu import Npu
from engine.run.commands import EXPANDABLE
from engine.run.watchdogs import WATCHDOGS
from support.published import wheel
from support.runs import ROOT
from support.torch_npu_wheel import torch_npu_wheel

CHECKED = {"logprobs_mode": logprob_check.check_logprobs}
"""What vllm-ascend 0.23 ignores → the check at the start of every instance."""


@cache
def python_files(root, *left_out):
    return "\n".join(path.read_text() for path in sorted(root.rglob("*.py")) if path.name not in left_out)


# Megatron -------------------------------------------------------------------------------------------------------------

CONFIGS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
"""Dataclasses whose fields Megatron reads as attributes."""
FUNCTIONS = (GPTModel, OptimizerParamScheduler, initialize_model_parallel, get_megatron_optimizer)
"""Their arguments are names in their bodies."""
GIVEN_BY = ("model/build.py", "platform/parallel.py", "trainer/optimizer.py", "trainer/policy.py")


def given_to(called):
    """The names of the keywords with which engine calls it."""
    found = set()
    for file in GIVEN_BY:
        for node in ast.walk(ast.parse((ROOT / "engine" / file).read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == called.__name__:
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_megatron_reads_every_field_of_its_configs_that_is_set(config):
    source = python_files(Path(megatron.core.__path__[0]), "transformer_config.py", "optimizer_config.py")
    given = given_to(config)
    assert given
    assert {name for name in given if not re.search(rf"(config|self|args)\.{name}\b", source)} == set()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_megatron_reads_every_argument_that_is_given(function):
    given = given_to(function)
    assert given
    body = function.__init__ if isinstance(function, type) else function
    tree = ast.parse(textwrap.dedent(inspect.getsource(body)))
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert given - read == set()


# torch, torch_npu -----------------------------------------------------------------------------------------------------

TORCH = {
    "PYTORCH_ALLOC_CONF": "lib/libc10.so",
    "GLOO_SOCKET_IFNAME": "lib/libtorch_cpu.so",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "__init__.py",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "distributed/launcher/api.py",
    **dict.fromkeys(WATCHDOGS["nccl"], "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"),
}
"""Environment variable → the file of the installed torch that reads it, or from which that is compiled."""


def has(library, name):
    """Whether a library has a string that no letter precedes."""
    parts = library.split(name.encode())
    return any(not part[-1:].isalpha() and part[-1:] != b"_" for part in parts[:-1])


@pytest.mark.parametrize("name", TORCH)
def test_torch_reads_every_variable_that_is_set_for_it(name):
    assert has((Path(torch.__file__).parent / TORCH[name]).read_bytes(), name)


@pytest.mark.slow
def test_torch_for_cuda_reads_the_watchdogs_variables():
    with wheel("torch", "2.13.0") as torch_wheel, torch_wheel.open("torch/lib/libtorch_cuda.so") as library:
        missing = set(WATCHDOGS["nccl"])
        tail = b""
        while missing and (block := library.read(1 << 26)):
            missing -= {name for name in missing if has(tail + block, name)}
            tail = block[-100:]
    assert missing == set()


@pytest.mark.slow
def test_torch_npu_reads_a_variable_for_each_purpose(tmp_path):
    """Its releases give the watchdogs' variable two names."""
    with torch_npu_wheel(tmp_path) as published:
        library = published.read("torch_npu/lib/libtorch_npu.so")
    assert has(library, "PYTORCH_NPU_ALLOC_CONF")
    assert has(library, "TASK_QUEUE_ENABLE")
    assert EXPANDABLE.split(":")[0].encode() in library
    assert {name for name in WATCHDOGS["hccl"] if has(library, name)} == {"HCCL_ASYNC_ERROR_HANDLING"}


def test_variables_of_libraries_that_no_package_has_are_these():
    """CUDA's, NCCL's and CANN's: they can't be looked up here."""
    assert {*Cuda.in_order, *Npu.in_order} == {
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_ALGO",
        "HCCL_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
    }


# vLLM, vllm-ascend ----------------------------------------------------------------------------------------------------

SERVER = "vllm/entrypoints/openai/api_server.py"
RUNNER = "vllm_ascend/worker/model_runner_v1.py"
WORKER = "vllm_ascend/worker/worker.py"
ON_NPU = {
    "model": "vllm/config/model.py",
    "served_model_name": SERVER,
    "host": SERVER,
    "port": SERVER,
    "dtype": RUNNER,
    "max_model_len": RUNNER,
    "max_num_seqs": RUNNER,
    "seed": WORKER,
    "tensor_parallel_size": WORKER,
    "generation_config": "vllm/config/model.py",
    "worker_extension_cls": "vllm/v1/worker/worker_base.py",
    "middleware": SERVER,
    "allowed_origins": SERVER,
    "skip_tokenizer_init": "vllm/tokenizers/registry.py",
    "enable_prefix_caching": "vllm/v1/core/sched/scheduler.py",
    "disable_uvicorn_access_log": SERVER,
    "disable_fastapi_docs": SERVER,
    "enable_return_routed_experts": RUNNER,
    "profiler_config": WORKER,
}
"""Argument → the file of vLLM 0.23.0 or vllm-ascend 0.23.0 that reads it in an instance on NPUs."""
BY_HUB = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
"""Variables that huggingface_hub reads, vLLM's dependency and ours."""


def arguments(device, tmp_path):
    """The names of the arguments that an instance with everything on gives vLLM."""
    given = ["--model", "m", "--device", device, "--routes", "--profile", str(tmp_path)]
    line = serve._vllm_arguments(serve._parser().parse_args(given), 8000)
    return {part.split("=")[0][2:].replace("-", "_") for part in line if part.startswith("--")}


def variables(device):
    by_device = {"cpu": serve.CPU_SETTINGS, "npu": serve.NPU_SETTINGS}.get(device, {})
    return {*serve.SETTINGS, *by_device, *serve.INVARIANT.get(device, {})} - {serve.NAP} - BY_HUB


def sources(published):
    """{name of a python file: its text}."""
    return {name: published.read(name).decode() for name in published.namelist() if name.endswith(".py")}


@pytest.fixture(scope="module")
def on_npu():
    with wheel("vllm", "0.23.0") as vllm, wheel("vllm-ascend", "0.23.0") as ascend:
        return sources(vllm) | sources(ascend)


@pytest.mark.slow
def test_vllm_on_npus_reads_every_argument_that_is_given(on_npu, tmp_path):
    assert arguments("npu", tmp_path) == {*ON_NPU, *CHECKED}
    assert {name for name, file in ON_NPU.items() if not re.search(rf"\.{name}\b", on_npu[file])} == set()
    ascend = "".join(text for file, text in on_npu.items() if file.startswith("vllm_ascend/worker/"))
    assert {name for name in CHECKED if f"config.{name}" in ascend} == set(), "it is read now: move it to ON_NPU"


@pytest.mark.slow
def test_vllm_reads_every_argument_that_is_given(tmp_path):
    with wheel("vllm", "0.32.0") as published:
        found = sources(published)
    text = "".join(text for file, text in found.items() if not file.endswith(("arg_utils.py", "cli_args.py")))
    given = arguments("cpu", tmp_path) | {"head_dtype"}
    assert {name for name in given if not re.search(rf"\.{name}\b", text)} == set()
    used = "".join(text for file, text in found.items() if file != "vllm/envs.py")
    names = variables("cpu") | variables("cuda")
    assert {name for name in names if f"envs.{name}" not in used and f'"{name}"' not in used} == set()


@pytest.mark.slow
def test_vllm_on_npus_reads_every_variable_that_is_set(on_npu):
    used = "".join(text for file, text in on_npu.items() if file != "vllm/envs.py")
    assert {name for name in variables("npu") if name not in used} == set()


def test_the_hub_reads_the_variables_that_keep_vllm_from_it():
    text = Path(huggingface_hub.__file__).with_name("constants.py").read_text()
    assert {name for name in BY_HUB if f'"{name}"' not in text} == set()
