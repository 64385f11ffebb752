"""The operators of torch that training calls, beside those that torch_npu lists a kernel for."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from engine.model import npu_operators, tri_model
from engine.model.build import build_model
from engine.wire.weights.checksum import device_checksum
from support.npu_operators import define
from support.operator_audit import Recorder, kinds, supported
from support.policies import a_group, a_policy
from support.runs import ROOT
from support.tiny_models import save
from support.torch_npu_wheel import torch_npu_wheel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("megatron")]

WITHOUT_GRADIENT = (
    "npu_add_rms_norm",
    "npu_attention_update",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_rms_norm_backward",
)
"""Operators of torch_npu that are called within gradients of our own."""


@pytest.fixture
def listed(tmp_path):
    """The operators that torch_npu lists."""
    with torch_npu_wheel(tmp_path) as wheel:
        return supported(wheel)


@pytest.fixture
def recorder(listed, monkeypatch):
    """Models are built as for an NPU, and computed by its operators with a CPU behind them, which are not recorded."""
    library = define()
    recorder = Recorder(listed)
    as_on_npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(GPTModel, "to", lambda self, device: self)
    monkeypatch.setattr(
        tri_model,
        "build_model",
        lambda shape, how: build_model(shape, replace(how, device=as_on_npu, attention="npu")),
    )
    monkeypatch.setattr(npu_operators, "on_npu", lambda x: True)
    for name in ("rms_norm", "npu_rotate", "npu_swiglu"):
        monkeypatch.setattr(npu_operators, name, recorder.unseen(vars(npu_operators)[name]))
    for name in WITHOUT_GRADIENT:
        monkeypatch.setattr(torch.ops.npu, name, quiet(recorder, getattr(torch.ops.npu, name)))
    yield recorder
    library._destroy()
    for name in WITHOUT_GRADIENT:
        vars(torch.ops.npu).pop(name, None)


def quiet(recorder, operator):
    def call(*given, **named):
        with recorder.pause():
            return operator(*given, **named)

    return call


def recorded(recorder, settings, folders):
    """What two updates of a dense model and of one with experts call, in fp32 and bf16, and the checksums of a
    publish."""
    for folder, dtype in product(folders, ("float32", "bfloat16")):
        policy = a_policy(settings, model__path=folder, train__dtype=dtype, train__ratio_gap_limit=0)
        for group in policy.optimizer.param_groups:
            group["fused"] = False  # as for an NPU's parameters
        with recorder:
            for _ in range(2):
                policy.start_step()
                policy.accumulate([a_group(seed=1), a_group((4, 0, 16, 1), index=1, seed=2)])
                policy.reduce_gradients(8)
                policy.step_optimizer()
            for parameter in policy.models.policy.parameters():
                device_checksum(parameter)
    return recorder.names


def written():
    """The lists of names in npu_operators.txt: with a kernel; made by torch of others; neither, only a CPU calls it."""
    lines = (ROOT / "tests/contract/npu_operators.txt").read_text().splitlines()
    return {kind: names.split() for kind, names in (line.split(": ") for line in lines)}


def test_the_list_is_what_training_calls(recorder, listed, settings, tmp_path):
    folders = [save(tmp_path / kind, kind, vocab_size=256) for kind in ("qwen3", "qwen3_moe")]
    names = recorded(recorder, settings, folders)
    found = kinds(names, listed)
    print(*(f"{kind}: {' '.join(names)}" for kind, names in found.items()), sep="\n")
    assert found == written()
    assert "repeat_interleave.self_Tensor" in listed  # so that what it is made of elsewhere is not called
