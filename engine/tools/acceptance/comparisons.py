"""Compares the kernels and the model of a platform with plain references on the host, forward and backward.

Needs only torch and megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.kernels import KERNELS, Kernel
from engine.model.kernels.reference import masked_attention
from engine.model.layout import Layout, make_layout
from engine.model.shape import ModelShape
from engine.tools.acceptance import plain_model
from engine.types import JsonObject

TINY = ModelShape(
    architecture="Qwen3ForCausalLM",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    vocabulary=1000,
    context=4096,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=True,
)
PROMPT = 37
RESPONSES = (50, 1, 0, 200, 33)
"""Lengths in tokens of the prompt and the responses that are compared: across block boundaries, one token, none."""
DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest relative norm of a difference. Inputs are rounded to the dtype first, and the reference gets the same
inputs.
"""
MODEL_LIMITS = {torch.float32: 1e-4, torch.bfloat16: float("inf")}
"""Largest relative norm of the difference of a tensor's gradient in the whole model. There is no limit in bf16, where
rounding errors add up over the layers; there, log-probabilities are compared."""
FUSED_FP32_LIMITS = {"npu": (1e-3, 4e-3)}
"""By attention kernel, in place of both limits in fp32: for its output and gradients, and for the whole model.

`allow_hf32 = False` (devices.exact_matmuls) affects matrix products outside npu_fusion_attention, for which no
precision in fp32 is documented. With the operands of all its products rounded to HF32's 11 bits of mantissa, these
comparisons differ by 2.5e-4 and 7.6e-4 (emulated on a CPU); products in bf16, with 16 times that, are still rejected.
"""
LOGPROB_LIMIT = 0.02
"""Largest mean difference between a token's log-probability and the fp32 reference."""
Groups = list[tuple[list[int], list[list[int]]]]
Operation = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """Differences between a kernel or the model and its reference."""

    what: str
    dtype: str
    errors: dict[str, float]
    """By the name of the result: the output, or the gradient of an input."""
    limit: float

    @property
    def right(self) -> bool:
        """Whether all differences are within the limit. NaN is not."""
        return all(error <= self.limit for error in self.errors.values())

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        limit = "no limit" if self.limit == float("inf") else f"limit {self.limit:g}"
        return f"{self.what}, {self.dtype}: {errors} ({limit}){'' if self.right else ' WRONG'}"

    def figures(self) -> JsonObject:
        """The figures for JSON, which has no infinity."""
        return {**asdict(self), "limit": None if self.limit == float("inf") else self.limit, "right": self.right}


def comparisons(attention: str, device: torch.device) -> Iterator[tuple[str, Callable[[], Iterator[Comparison]]]]:
    """What is compared, and the function that compares it: the attention kernel of that name, the fused operations, the
    product of all experts and the whole model, in fp32 and bf16. The functions need the session of a rank
    (engine.platform.single_session)."""
    for dtype in DTYPES:
        yield f"attention {attention}, {_name(dtype)}", partial(compare_attention, attention, device, dtype)
        yield f"RMSNorm, SwiGLU and rotation, {_name(dtype)}", partial(compare_operations, device, dtype)
        yield f"experts, {_name(dtype)}", partial(compare_experts, device, dtype)
        yield f"model, {_name(dtype)}", partial(compare_model, attention, device, dtype)


def compare_attention(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Compare the kernel with the mask of the layout, with and without a shared prompt."""
    groups = random_groups(PROMPT, list(RESPONSES), TINY.vocabulary) + random_groups(130, [140, 3], TINY.vocabulary)
    for shared in (True, False):
        here = make_layout(groups, shared)
        keys = (here.row_size, TINY.kv_heads, TINY.head_dim)
        yield _compared(
            what=f"attention {name}{'' if shared else ', prompt not shared'}",
            names=("q", "k", "v"),
            ours=partial(_attend, KERNELS[name], here.to(device)),
            reference=partial(_attend, masked_attention, here),
            inputs=_random([(here.size, TINY.heads, TINY.head_dim), keys, keys], dtype),
            device=device,
            limit=FUSED_FP32_LIMITS[name][0] if dtype == torch.float32 and name in FUSED_FP32_LIMITS else None,
        )


def _attend(kernel: Kernel, row: Layout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, k, v, row, None)


def compare_operations(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Compare RMSNorm, SwiGLU and the rotation, as the model's layers call them."""
    from engine.model.norm import RMSNorm
    from engine.model.rotary import RotaryAtPositions, rotate_positions
    from engine.model.swiglu import SwiGLU

    rows = 300

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        module = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), TINY.hidden, TINY.norm_eps)
        return torch.func.functional_call(module.to(device), {"weight": weight}, (x,))

    positions = torch.arange(rows) * 7
    tables = RotaryAtPositions(TINY)(positions.to(device))
    angle = torch.outer(positions.float(), plain_model.frequencies(TINY)).repeat(1, 2)[:, None, None, :]
    cases: list[tuple[str, Operation, Operation, dict[str, tuple[int, ...]]]] = [
        (
            "RMSNorm", normed, lambda x, weight: plain_model.norm(x, weight, TINY.norm_eps),
            {"x": (rows, 1, TINY.hidden), "weight": (TINY.hidden,)},
        ),
        (
            "SwiGLU", SwiGLU(None), lambda joint: F.silu(joint.chunk(2, -1)[0]) * joint.chunk(2, -1)[1],
            {"x": (rows, 1, 2 * TINY.intermediate)},
        ),
        (
            "rotation", lambda t: rotate_positions(t, tables), lambda t: plain_model.turned(t, angle),
            {"x": (rows, 1, TINY.heads, TINY.head_dim)},
        ),
    ]  # fmt: skip
    for what, ours, reference, sizes in cases:
        yield _compared(
            what=what,
            names=tuple(sizes),
            ours=ours,
            reference=reference,
            inputs=_random(list(sizes.values()), dtype),
            device=device,
        )


def compare_experts(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Compare the product of all experts at once, one of them without tokens. Yields nothing if the platform has
    none.
    """
    from engine.model.experts import grouped_product, product_for

    sizes = (100, 0, 199, 1)
    product = product_for(torch.zeros(1, dtype=dtype, device=device), TINY.hidden, TINY.intermediate)
    if product is None:
        return
    yield _compared(
        what="experts",
        names=("x", *(f"weight {number}" for number in range(len(sizes)))),
        ours=lambda x, *weights: grouped_product(product, sizes, x, torch.stack(weights)),
        reference=lambda x, *weights: torch.cat(
            [tokens @ weight.T for tokens, weight in zip(x.split(list(sizes)), weights, strict=True)]
        ),
        inputs=_random([(sum(sizes), TINY.hidden), *[(TINY.intermediate, TINY.hidden)] * len(sizes)], dtype),
        device=device,
    )


def compare_model(attention: str, device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Compare the trainer's model with a shared prompt with the plain model: log-probabilities, and each tensor's
    gradient."""
    from engine.model.hf_weights import export_weights

    model = build(shape=TINY, attention=attention, device=device, dtype=dtype)
    groups = random_groups(PROMPT, list(RESPONSES), TINY.vocabulary)
    ours = chosen(model, groups, shared=True)
    (-ours.mean()).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    weights = {
        n: t.detach().float().cpu().clone().requires_grad_()
        for n, t in export_weights(dict(model.named_parameters()), model, TINY)
    }
    plain = torch.cat([plain_model.logprobs(weights, p, r, TINY) for p, responses in groups for r in responses if r])
    (-plain.mean()).backward()
    mean = float((ours.float().cpu() - plain).detach().abs().mean())
    worst = max(_difference(g.float().cpu(), weights[n].grad) for n, g in export_weights(grads, model, TINY))
    name = _name(dtype)
    fused = dtype == torch.float32 and attention in FUSED_FP32_LIMITS
    limit = FUSED_FP32_LIMITS[attention][1] if fused else MODEL_LIMITS[dtype]
    yield Comparison("model, log-probabilities", name, {"mean": mean}, LOGPROB_LIMIT)
    yield Comparison("model, gradients", name, {"worst tensor": worst}, limit)


def _random(sizes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw).to(dtype) for size in sizes]


def _compared(
    what: str,
    names: tuple[str, ...],
    ours: Operation,
    reference: Operation,
    inputs: list[Tensor],
    device: torch.device,
    limit: float | None = None,
) -> Comparison:
    """Compare output and gradients of `ours` on the device with `reference` on the host in fp32. `names`: the names of
    the inputs. `limit`: the largest difference allowed; None: the dtype's own limit."""
    dtype = inputs[0].dtype
    here = [one.float().requires_grad_() for one in inputs]
    there = [one.to(device).requires_grad_() for one in inputs]
    expected = reference(*here)
    found = ours(*there)
    upstream = _random([tuple(expected.shape)], dtype)[0]
    wanted = [expected.detach(), *torch.autograd.grad(expected, here, upstream.float())]
    given = [found.detach(), *torch.autograd.grad(found, there, upstream.to(device))]
    results = zip(("output", *(f"d{name}" for name in names)), given, wanted, strict=True)
    errors = {name: _difference(a.float().cpu(), b) for name, a, b in results}
    return Comparison(what, _name(dtype), errors, LIMITS[dtype] if limit is None else limit)


def _difference(found: Tensor, expected: Tensor | None) -> float:
    assert expected is not None
    return float((found - expected).norm() / (expected.norm() or 1.0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# the trainer's model with random weights ----------------------------------------------------------


def random_groups(prompt: int, lengths: list[int], vocabulary: int) -> Groups:
    """One group of random tokens: a prompt, and responses of these lengths."""
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    return [(tokens(prompt), [tokens(length) for length in lengths])]


def build(
    shape: ModelShape, attention: str, device: torch.device, dtype: torch.dtype, recompute: bool | int | str = False
) -> torch.nn.Module:
    """The trainer's model with random weights (norms near 1). `attention`: a key of KERNELS."""
    from engine.model.build import Computation, build_model

    torch.manual_seed(0)
    model = build_model(shape, Computation(dtype=dtype, recompute=recompute, attention=attention, device=device))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, device=device)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.05 * noise)
    return model.train()


def chosen(model: torch.nn.Module, groups: Groups, shared: bool) -> Tensor:
    """[T] log-probabilities of all response tokens, with gradients."""
    from engine.model.build import compute_hidden, target_logprobs

    row = make_layout(groups, shared).to(next(model.parameters()).device)
    return target_logprobs(model, compute_hidden(model, row), row, 1.0, entropy=False)[0]
