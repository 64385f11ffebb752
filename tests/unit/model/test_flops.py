"""The operations of a step against torch's own count, and the peaks of devices."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.model.flops import forward_flops, micro_step, peak_of, training_flops
from engine.model.layout import Segment
from engine.model.shape import Experts
from engine.tools.acceptance import plain_model
from engine.tools.acceptance.comparisons import TINY


def test_the_formula_is_torchs_count_of_the_plain_model():
    """The plain model also computes hidden pairs, so the pairs are tokens²."""
    config = Qwen3Config(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.hidden,
        intermediate_size=TINY.intermediate,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        head_dim=TINY.head_dim,
    )
    weights = Qwen3ForCausalLM(config).state_dict()
    prompt = 20
    response = 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        plain_model.logprobs(weights, [0] * prompt, [0] * response, TINY)
    tokens = prompt + response
    assert counter.get_total_flops() == forward_flops(TINY, tokens, tokens**2, response)


def test_a_micro_step_is_three_times_its_forward_passes():
    separate = 4 * forward_flops(TINY, 30, 30 * 31 / 2, 10)
    assert micro_step(sizes=TINY, prompt=20, response=10, group=4, shared=False) == pytest.approx(3 * separate)
    assert micro_step(sizes=TINY, prompt=20, response=10, group=4, shared=True) < 3 * separate
    one = [micro_step(sizes=TINY, prompt=20, response=10, group=1, shared=shared) for shared in (True, False)]
    assert one[0] == one[1]


def test_a_micro_batch_is_its_segments_without_the_filler():
    groups = [Segment(0, 20, (10, 4)), Segment(34, 7, (5,))]
    pairs = 20 * 21 / 2 + (10 * 20 + 10 * 11 / 2) + (4 * 20 + 4 * 5 / 2), 12 * 13 / 2
    expected = 3 * (forward_flops(TINY, 34, pairs[0], 14) + forward_flops(TINY, 12, pairs[1], 5))
    assert training_flops(TINY, [*groups, Segment(46, 2, ())]) == pytest.approx(expected)


def test_of_experts_those_count_that_compute_a_token():
    sparse = replace(TINY, experts=Experts(count=8, per_token=2, intermediate=16, normalised=True, layers=(0,)))
    less = 2 * 10 * 3 * TINY.hidden * (TINY.intermediate - 2 * 16)
    assert forward_flops(TINY, 10, 55, 4) - forward_flops(sparse, 10, 55, 4) == less


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Ascend910B2", 353.9),
        ("Ascend910B3", 294.9),
        ("Ascend910_9382", 353.9),
        ("NVIDIA GeForce RTX 4090", None),
        ("Ascend910B1", None),
        ("CPU", None),
    ],
)
def test_peaks_by_the_devices_name(name, tera):
    assert peak_of(name) == (None if tera is None else tera * 1e12)
