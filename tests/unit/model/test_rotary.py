"""Rotary positions against transformers'."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.model.rotary import RotaryAtPositions, rotary_frequencies, rotate_positions
from engine.model.shape import Llama3Scaling, ModelShape

STRETCHED = [Llama3Scaling(32.0, 1.0, 4.0, 8192), Llama3Scaling(8.0, 2.0, 5.0, 48)]


def shape_of(head_dim, theta, scaling):
    sizes = {"layers": 2, "hidden": 4 * head_dim, "heads": 4, "kv_heads": 2, "head_dim": head_dim, "intermediate": 80}
    return ModelShape(
        "LlamaForCausalLM",
        **sizes,
        vocabulary=61,
        context=128,
        rope_theta=theta,
        norm_eps=1e-6,
        tied=False,
        rope_scaling=scaling,
    )


PLAIN = shape_of(16, 10000.0, None)


def theirs(shape):
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling:
        s = shape.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_context,
        }
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        rope_parameters=rope,
        max_position_embeddings=131072,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", [None, *STRETCHED])
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 500000.0), (12, 1e6), (128, 10000.0)])
def test_against_transformers(head_dim, theta, scaling):
    shape = shape_of(head_dim, theta, scaling)
    reference = theirs(shape)
    assert torch.equal(rotary_frequencies(shape), reference.inv_freq)
    positions = torch.tensor([0, 1, 2, 3, 3, 40, 2, 100_000])
    tables = RotaryAtPositions(shape)(positions)
    cos, sin = reference(torch.empty(0), positions[None])
    assert tables.shape == (3, 8, 1, 1, head_dim)
    assert torch.equal(tables[0, :, 0, 0], cos[0])
    signs = torch.cat([-torch.ones(head_dim // 2), torch.ones(head_dim // 2)])
    assert torch.equal(tables[1, :, 0, 0], signs * sin[0])
    assert torch.equal(tables[2, :, 0, 0], -signs * sin[0])


def test_scaling_changes_long_wavelengths_only():
    plain = rotary_frequencies(shape_of(64, 500000.0, None))
    stretched = rotary_frequencies(shape_of(64, 500000.0, STRETCHED[0]))
    assert torch.equal(stretched[:10], plain[:10])
    torch.testing.assert_close(stretched[-1], plain[-1] / 32)
    assert (stretched <= plain).all()


def test_positions_come_from_the_layout_and_stay_fp32():
    rotary = RotaryAtPositions(PLAIN).bfloat16()  # as a mixed-precision wrapper casts the whole model
    positions = torch.tensor([0, 1, 2, 2, 3])
    carried = SimpleNamespace(layout=SimpleNamespace(positions=positions))
    handed = rotary.get_rotary_seq_len(*[None] * 4, carried)  # by place, as Megatron does
    assert handed is positions
    tables = rotary(handed, packed_seq=False, cp_group=None)
    assert tables.dtype == torch.float32
    assert torch.equal(tables[:, 2], tables[:, 3])
    torch.testing.assert_close(tables[0, 4, 0, 0, :8], (3 * rotary_frequencies(PLAIN)).cos(), rtol=0, atol=0)


def test_a_model_in_bf16_gets_tables_that_are_rounded_once():
    positions = torch.tensor([0, 1, 2, 90])
    tables = RotaryAtPositions(PLAIN, torch.bfloat16)(positions)
    exact = RotaryAtPositions(PLAIN)(positions)
    assert tables.dtype == torch.bfloat16
    assert torch.equal(tables, exact.bfloat16())
    queries = torch.randn(4, 1, 4, 16, dtype=torch.bfloat16)
    assert torch.equal(rotate_positions(queries, tables), rotate_positions(queries, exact))


def test_turned_queries_and_their_gradient_are_those_of_transformers():
    torch.manual_seed(0)
    shape = shape_of(16, 10000.0, STRETCHED[1])
    positions = torch.tensor([0, 1, 2, 2, 90])
    queries = torch.randn(5, 1, 4, 16, requires_grad=True)
    upstream = torch.randn(5, 1, 4, 16)
    ours = rotate_positions(queries, RotaryAtPositions(shape)(positions))
    cos, sin = theirs(shape)(torch.empty(0), positions[None])
    wanted = apply_rotary_pos_emb(queries.permute(1, 2, 0, 3), queries.permute(1, 2, 0, 3), cos, sin)[0].permute(
        2, 0, 1, 3
    )
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad((out * upstream).sum(), queries)[0] for out in (ours, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_turning_keeps_the_dtype_and_refuses_interleaved_pairs():
    tables = RotaryAtPositions(PLAIN)(torch.tensor([3, 4]))
    assert rotate_positions(torch.randn(2, 1, 4, 16, dtype=torch.bfloat16), tables).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="interleaved"):
        rotate_positions(torch.randn(2, 1, 4, 16), tables, interleaved=True)
