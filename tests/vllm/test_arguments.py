"""Arguments of vLLM that a recipe gives (rollout.vllm): how they reach vLLM, and how its refusal reaches the user."""

import asyncio
import sys
import types
from pathlib import Path

import pytest

from engine.errors import BadInput
from engine.instance.vllm import serve
from engine.model.shape import read_shape
from engine.run import vllm_command as commands
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.memory import ENGINE_GIB, GIB, total_parameters
from engine.run.process import Child
from support.tiny_models import save
from support.vllm_instance import TOKEN, config


def on_a_cpu(arguments):
    made = config(vllm=arguments)
    return made.model_copy(update={"platform": made.platform.model_copy(update={"device": "cpu"})})


def test_arguments_of_the_recipe_reach_vllms_command_line_last(monkeypatch, tmp_path):
    monkeypatch.setenv(commands.PYTHON, sys.executable)
    given = {
        "enforce_eager": False,
        "async_scheduling": True,
        "gpu_memory_utilization": 0.8,
        "max_num_batched_tokens": 4096,
        "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    made = commands.instance_command_line(
        config=on_a_cpu(given), model=Path(save(tmp_path / "m")), name="i", number=0, port_file=tmp_path
    )[0]
    line = serve._vllm_arguments(serve._parser().parse_args(made[3:]), 8000)
    assert line[line.index("--no-enforce-eager") :] == [
        "--no-enforce-eager",
        "--async-scheduling",
        "--gpu-memory-utilization=0.8",
        "--max-num-batched-tokens=4096",
        "--kv-cache-dtype=fp8",
        "--cudagraph-capture-sizes",
        "1",
        "2",
        '--compilation-config={"cudagraph_mode": "FULL_DECODE_ONLY"}',
    ]
    assert "--enforce-eager" in line  # on a CPU; vLLM takes the last


@pytest.mark.parametrize(("given", "wanted"), [({}, 0.4 * 80 * GIB), ({"kv_cache_memory_bytes": 5}, None)])
def test_the_cache_on_a_shared_device_is_not_measured_beside_the_trainer(monkeypatch, tmp_path, given, wanted):
    """It is vLLM's share without the weights and the allowance of the dry run."""
    monkeypatch.setenv(commands.PYTHON, sys.executable)
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(get_device_total_memory=lambda: 80 * GIB)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    shared = on_a_cpu({"gpu_memory_utilization": 0.4, **given})
    shared = shared.model_copy(update={"rollout": shared.rollout.model_copy(update={"share_devices": True})})
    model = Path(save(tmp_path / "m"))
    made = commands.instance_command_line(config=shared, model=model, name="i", number=0, port_file=tmp_path)[0]
    line = serve._vllm_arguments(serve._parser().parse_args(made[3:]), 8000)
    (cache,) = [one.partition("=")[2] for one in line if one.startswith("--kv-cache-memory-bytes=")]
    weights = total_parameters(read_shape(model)) * 4
    assert int(cache) == (5 if wanted is None else pytest.approx(wanted - weights - ENGINE_GIB * GIB, abs=2))


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"no_such_name": 3, "max_model": 9},
            r"rollout\.vllm\.no_such_name, rollout\.vllm\.max_model: vLLM .* unrecognized .* --no-such-name=3 --max-.*",
        ),
        (
            {"enforce_eager": True, "max_num_batched_tokens": "many"},
            r"rollout\.vllm\.max_num_batched_tokens: vLLM .* 'many'",
        ),
    ],
)
def test_an_argument_that_vllm_does_not_take_is_bad_input_in_one_line_with_its_key(tmp_path, given, said):
    arguments, environment = instance_command(
        config=config(vllm=given),
        model=Path(save(tmp_path / "model")),
        name="instance-0",
        number=0,
        port_file=tmp_path / "port",
    )
    child = Child("instance-0", arguments, tmp_path / "log", environment | {"METRONOME_TOKEN": TOKEN})
    try:
        with pytest.raises(BadInput, match=rf"^instance-0: {said} \(its log: .*\)$"):
            asyncio.run(InstanceProcess(0, child, tmp_path / "port").serves(300.0))
    finally:
        child.stop()
