"""What the parts that are whole runs ask for and conclude. The orchestrator is scripted; tests/integration runs it."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from engine import platform
from engine.tools.acceptance import run_parts
from engine.tools.acceptance.notes import NoteWriter, PartFailed, PartTask
from engine.tools.acceptance.run_parts import configuration, rollout_choice

CPU = platform.PLATFORMS["cpu"]
CUDA = platform.PLATFORMS["cuda"]


@pytest.fixture
def task(tmp_path):
    return PartTask(platform="cpu", settings=(), folder=tmp_path, notes=NoteWriter(tmp_path / "notes.jsonl"))


@pytest.fixture
def machine(monkeypatch):
    """Sets the number of CUDA devices, and what the environment with vLLM was built for (None: there is none)."""

    def set_to(devices, vllm):
        monkeypatch.setattr(run_parts, "device_count", lambda machine: devices)
        monkeypatch.setattr(run_parts, "_no_vllm", lambda machine: "" if vllm else "no vLLM")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return set_to


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """What the runs do, by name: the weights that they train, and the steps on older weights."""
    made = SimpleNamespace(stale=(), weights={})

    def train(task, config, timeout_s, replay=None):
        name = config.run.name
        (config.folder / "policy").mkdir(parents=True)
        weights = made.weights.get(name, torch.ones(3))
        save_file({"weight": weights}, config.folder / "policy" / "model.safetensors")
        seen = [[step - 1] if (name, step) in made.stale else [step] for step in range(4)]
        return [
            {"sync_s": 0.5, "train_s": 2.0, "rollout_s": 1.0, "step": step, "step_s": 1.0, "versions_seen": seen[step]}
            for step in range(4)
        ]

    monkeypatch.setattr(run_parts, "train", train)
    monkeypatch.setattr(run_parts, "make_model", lambda folder, sizes: folder)
    return made


def test_vllm_samples_on_a_second_device_over_the_platforms_transport(machine):
    machine(devices=2, vllm=True)
    found = rollout_choice(CUDA, (), training=True)
    assert (found.engine, found.transport, found.devices, found.remark) == ("vllm", "nccl", (1,), "")
    assert rollout_choice(CUDA, (), training=False).devices == (0,)


@pytest.mark.parametrize(("devices", "vllm", "why"), [(1, True, "needs a second device"), (8, False, "no vLLM")])
def test_without_vllm_or_a_second_device_the_embedded_engine_samples(machine, devices, vllm, why):
    machine(devices, vllm)
    found = rollout_choice(CUDA, (), training=True)
    assert (found.engine, found.transport) == ("embedded", "gloo")
    assert "nccl is not tested" in found.remark
    assert why in found.remark


@pytest.mark.parametrize("devices", [1, 2])
def test_the_configuration_of_a_run_on_devices_is_one(machine, task, devices):
    machine(devices=devices, vllm=True)
    config = configuration(task, CUDA, rollout_choice(CUDA, (), training=True), {"run.name": "a", "model.path": "/m"})
    dtype = "bfloat16" if devices == 2 else "float32"
    assert (config.train.dtype, config.model.dtype, config.train.ratio_gap_limit) == (dtype, dtype, 0)
    assert config.platform.device == "cuda"


def test_the_users_settings_count_most(task):
    mine = PartTask(platform="cpu", settings=("train.steps=9",), folder=task.folder, notes=task.notes)
    config = configuration(mine, CPU, rollout_choice(CPU, (), training=True), {"run.name": "a", "train.steps": 4})
    assert config.train.steps == 9


def test_weights_that_differ_on_a_cpu_fail_the_part(task, launched):
    launched.weights["periodic"] = torch.tensor([1.0, 1.0, 1.0000001])
    with pytest.raises(PartFailed, match="sync and periodic trained differ in 1 of 1 tensors"):
        run_parts.sync_against_periodic(task)


def test_a_step_on_older_weights_fails_the_part(task, launched):
    launched.stale = {("periodic", 2)}
    with pytest.raises(PartFailed, match=r"mode periodic: the steps \[2\] trained on responses of other weights"):
        run_parts.sync_against_periodic(task)


def test_visible_devices_keep_their_numbers(machine, monkeypatch):
    machine(devices=2, vllm=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert rollout_choice(CUDA, (), training=True).devices == (6,)


def test_the_users_engine_counts_more(machine):
    machine(devices=8, vllm=True)
    assert rollout_choice(CUDA, ("rollout.engine=embedded",), training=True).engine == "embedded"
