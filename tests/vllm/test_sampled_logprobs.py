"""Log-probabilities of real vLLM: those before top-p, as conform's rule "log-probabilities" says of an instance
(tests/contract/test_rollout_routes.py). Here: an instance that reports others, and the sampler of the second runner."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from engine.errors import BadInput
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child
from engine.run.vllm_command import vllm_interpreter
from support.runs import ROOT
from support.tiny_models import save
from support.vllm_instance import START_S, TOKEN, config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SECOND = """
import torch
from types import SimpleNamespace
from engine.instance.vllm.sampled_logprobs import change_second_sampler
from vllm.v1.worker.gpu.sample import sampler as module

module.gumbel_sample = lambda logits, *_, **__: logits.argmax(-1)  # a kernel of triton's
change_second_sampler(module.Sampler)
sampler = object.__new__(module.Sampler)
sampler.use_flashinfer = sampler.use_fp64_gumbel = sampler.use_xpu_sampler = False
sampler.logprobs_mode = "processed_logprobs"
state = SimpleNamespace(gpu=None)
sampler.apply_sampling_params = lambda logits, *_, **__: logits / 0.6
logits = torch.randn(3, 40)
for top_p in (None, torch.full((3,), 0.5)):
    sampler.sampling_states = SimpleNamespace(
        temperature=state,
        seeds=state,
        get_top_k_top_p=lambda *_: (None, top_p),
        any_greedy=lambda _: False,
        any_explicit_seed=lambda _: False,
    )
    tokens, reported = sampler.sample(logits, *[None] * 7, return_logprobs=True)
    assert torch.equal(reported, logits / 0.6), top_p
    assert torch.equal(tokens, logits.argmax(-1))
print("same")
"""


def test_an_instance_that_reports_log_probabilities_after_top_p_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/vllm_sampler_plugin"))
    arguments, environment = instance_command(
        config=config(), model=Path(save(tmp_path / "model")), name="instance-0", number=0, port_file=tmp_path / "port"
    )
    child = Child("instance-0", arguments, tmp_path / "log", environment | {"METRONOME_TOKEN": TOKEN})
    said = r"^instance-0: vLLM 0\.\d+\.\d+ on cpu .* reports log-probabilities after top_p \(processed_logprobs\)"
    try:
        with pytest.raises(BadInput, match=said):
            asyncio.run(InstanceProcess(0, child, tmp_path / "port").serves(START_S))
    finally:
        child.stop()


def test_the_sampler_of_the_second_runner_reports_the_logits_before_top_p():
    """Its methods are the real ones from the temperature on, but for triton's kernel that draws."""
    done = subprocess.run(
        [vllm_interpreter(), "-c", SECOND],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "has no attribute '_sample_random'" in done.stderr:
        pytest.skip("this release's second runner has another sampler, and CUDA uses the first")
    assert done.stdout.endswith("same\n"), done.stderr
