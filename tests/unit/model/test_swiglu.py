"""SwiGLU against torch's own operations."""

import torch
import torch.nn.functional as F

from engine.model.swiglu import SwiGLU


def test_values_and_gradients_are_those_of_the_plain_operations():
    joint = torch.randn(5, 3, 14, dtype=torch.float64, requires_grad=True)
    swiglu = SwiGLU(None)
    gate, up = joint.chunk(2, -1)
    torch.testing.assert_close(swiglu(joint), F.silu(gate) * up, rtol=0, atol=0)
    assert torch.autograd.gradcheck(swiglu, joint)
    weight = torch.randn(5, 3, 7, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), joint)[0] for out in (swiglu(joint), F.silu(gate) * up))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)


def test_bfloat16_keeps_its_dtype():
    joint = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    out = SwiGLU(None)(joint)
    out.sum().backward()
    assert out.dtype == joint.grad.dtype == torch.bfloat16
