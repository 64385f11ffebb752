"""What is compiled on CUDA, compiled by torch for the CPU: equal to the plain operations, values and gradients."""

import pytest
import torch

from engine.model import fusion, rotary, swiglu


@pytest.fixture
def compiled(monkeypatch):
    """Tensors of the host are taken for ones on CUDA. The names of the functions that were compiled."""
    called = []

    def noted(function):
        called.append(function.__name__)
        return fusion.compiled(function)

    for module in (rotary, swiglu):
        monkeypatch.setattr(module, "fuses", lambda x: True)
        monkeypatch.setattr(module, "compiled", noted)
    return called


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def results(operation, x):
    x = x.clone().requires_grad_()
    out = operation(x)
    return out.detach(), *torch.autograd.grad(out, x, drawn(*out.shape))


CASES = {
    "swiglu": (swiglu.SwiGLU(None), [(5, 1, 48), (9, 1, 48)], ["product", "gradient"]),
    "rotation": (lambda t: rotary.rotate(t, TABLES[:, : len(t)]), [(5, 1, 4, 16), (9, 1, 4, 16)], ["turn", "turn"]),
}
ANGLES = torch.outer(torch.arange(9.0), torch.rand(8, generator=torch.Generator().manual_seed(0)))[:, None, None, :]
TABLES = torch.stack(
    [
        torch.cat([ANGLES.cos()] * 2, -1),
        torch.cat([-ANGLES.sin(), ANGLES.sin()], -1),
        torch.cat([ANGLES.sin(), -ANGLES.sin()], -1),
    ]
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_the_compiled_kernel_is_the_plain_operation(case, request):
    operation, shapes, names = CASES[case]
    expected = [results(operation, drawn(*shape)) for shape in shapes]
    called = request.getfixturevalue("compiled")
    for shape, values in zip(shapes, expected, strict=True):
        for found, value in zip(results(operation, drawn(*shape)), values, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    assert called == names * len(shapes)


class OnCuda:
    """What a tensor says on a GPU."""

    is_cuda = True


def test_without_triton_a_warning_says_what_is_not_fused(monkeypatch):
    fusion._has_compiler.cache_clear()
    monkeypatch.setattr(fusion.importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed: SwiGLU and the rotation are not fused on CUDA"):
        assert not fusion.fuses(OnCuda())
    monkeypatch.undo()
    fusion._has_compiler.cache_clear()


def test_a_cpu_computes_single_operations(monkeypatch):
    monkeypatch.setattr(fusion, "_has_compiler", lambda: True)
    assert fusion.fuses(OnCuda())
    assert not fusion.fuses(torch.zeros(1))
