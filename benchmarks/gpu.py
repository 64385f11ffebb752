"""Checks and measures the CUDA path of training on one GPU.

`python benchmarks/gpu.py [--shapes 0.6b 1.7b] [--prompt 1024] [--response 1024]`

Needs torch and megatron-core only. **It has not run on CUDA yet, because no GPU was available.** The correctness part
has run on the CPU with a small shape: `--device cpu --tiny` (with the CPU's kernel, not FlexAttention).

1. Correctness: log-probabilities and gradients of a small random Qwen3 with a shared prompt are compared with the same
   model written plainly in this file (each response by itself, full mask), in fp32 (without TF32) and in bf16. The
   limits are 1e-4 for fp32 gradients (relative norm per tensor), and 0.02 for the mean difference of bf16
   log-probabilities to the fp32 reference. The formula for operations (flops.py) is compared with the operations that
   torch counts in the plain model.
2. Speed in bf16: a micro-step (forward, loss, backward) of models of Qwen3-0.6B's and 1.7B's shapes with random
   weights, one group, shared prompt on and off. Tokens/s counts prompt and response of every response, even if the
   prompt was computed once. Model FLOP utilisation counts the operations of the computed tokens, over the device's
   dense bf16 peak. Activations are kept, or layers are recomputed with `--recompute` (recomputation does not count).

Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs without installation

from flops import forward, micro_step

from engine import platform
from engine.errors import BadInput
from engine.model.shape import ModelShape

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
SHAPES = {
    "0.6b": replace(
        TINY, layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocabulary=151936
    ),
    "1.7b": replace(
        TINY, layers=28, hidden=2048, heads=16, kv_heads=8, head_dim=128, intermediate=6144, vocabulary=151936
    ),
}
"""The published sizes of Qwen3-0.6B and Qwen3-1.7B."""
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bf16 operations per second (1e12), as published by the maker, by a part of the device's name."""
Groups = list[tuple[list[int], list[list[int]]]]


def main() -> None:
    arguments = parse()
    try:
        machine = platform.get(arguments.device)
    except BadInput as error:
        raise SystemExit(f"error: {error}") from None
    torch.backends.cuda.matmul.allow_tf32 = False
    with platform.single(machine) as device:
        figures: dict[str, Any] = {"device": name_of(device), "torch": torch.__version__}
        figures["correctness"] = [
            correctness(machine.attention, device, dtype) for dtype in (torch.float32, torch.bfloat16)
        ]
        check_flops(device)
        if not arguments.tiny:
            peak = arguments.peak_tflops or next((p for n, p in PEAK_TFLOPS.items() if n in name_of(device)), None)
            figures["speed"] = [
                speed(name=name, machine=machine, device=device, arguments=arguments, shared=shared, peak=peak)
                for name in arguments.shapes
                for shared in (True, False)
            ]
    print("RESULT " + json.dumps(figures))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="correctness only")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--recompute", action="store_true", help="compute layers again in the backward pass, to save memory"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="of the device in bf16, if it is not one of " + ", ".join(PEAK_TFLOPS)
    )
    return parser.parse_args()


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def correctness(kernel: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the trainer's model with a shared prompt with the plain model. Raises SystemExit if a limit is
    exceeded."""
    from engine.model.hf_weights import export

    model = build(TINY, kernel, device, dtype, recompute=False)
    groups = random_groups(37, [50, 1, 0, 200, 33], TINY.vocabulary)
    ours = chosen(model, groups, shared=True)
    (-ours.mean()).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    weights = {
        n: t.detach().float().clone().requires_grad_() for n, t in export(dict(model.named_parameters()), model, TINY)
    }
    plain = torch.cat([reference(weights, p, r, TINY) for p, responses in groups for r in responses if r])
    (-plain.mean()).backward()
    mean = float((ours - plain).detach().abs().mean())
    worst = max(
        float((g.float() - weights[n].grad).norm() / weights[n].grad.norm()) for n, g in export(grads, model, TINY)
    )
    print(
        f"{dtype}: log-probabilities differ by {mean:.2e} on average, gradients by {worst:.2e} (relative norm, worst "
        "tensor)"
    )
    if (dtype is torch.float32 and worst > 1e-4) or mean > 0.02:
        raise SystemExit(f"error: {dtype} is wrong: {mean:.2e} (limit 0.02), {worst:.2e} (limit 1e-4 in fp32)")
    return {"dtype": str(dtype), "mean_logprob_error": mean, "worst_gradient_error": worst}


def speed(
    name: str,
    machine: platform.Platform,
    device: torch.device,
    arguments: argparse.Namespace,
    shared: bool,
    peak: float | None,
) -> dict[str, Any]:
    """Median seconds of a micro-step, with tokens/s and FLOP utilisation."""
    shape = SHAPES[name]
    model = build(
        shape=shape, kernel=machine.attention, device=device, dtype=torch.bfloat16, recompute=arguments.recompute
    )
    groups = random_groups(arguments.prompt, [arguments.response] * arguments.group, shape.vocabulary)
    machine.reset_peak()
    seconds = timed(lambda: (-chosen(model, groups, shared).mean()).backward(), machine, arguments.repeats)
    trained = arguments.group * (arguments.prompt + arguments.response)
    needed = micro_step(
        sizes=shape, prompt=arguments.prompt, response=arguments.response, group=arguments.group, shared=shared
    )
    found = {
        "shape": name,
        "shared_prompt": shared,
        "seconds": seconds,
        "tokens_per_s": trained / seconds,
        "model_flop_utilisation": needed / seconds / (peak * 1e12) if peak else None,
        "peak_bytes": machine.peak_bytes(),
    }
    print(found, flush=True)
    return found


def timed(call: Callable[[], None], machine: platform.Platform, repeats: int) -> float:
    """Median wall seconds of a call. The first two calls (compilation) do not count."""
    taken = []
    for _ in range(repeats + 2):
        machine.synchronize()
        started = time.perf_counter()
        call()
        machine.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def check_flops(device: torch.device) -> None:
    """Raises SystemExit unless the formula agrees with torch's count in the plain model, which also computes hidden
    pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    weights = {name: torch.zeros(size, device=device) for name, size in sizes(TINY).items()}
    prompt = 20
    response = 12
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        reference(weights, [0] * prompt, [0] * response, TINY)
    tokens = prompt + response
    counted = counter.get_total_flops()
    expected = forward(TINY, tokens, tokens**2, response)
    if counted != expected:
        raise SystemExit(
            f"error: torch counts {counted} operations in the plain model, the formula of flops.py {expected:.0f}"
        )


def sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Sizes of the plain model's tensors, by Hugging Face's names."""
    hidden = shape.hidden
    dim = shape.head_dim
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden), "mlp.down_proj": (hidden, shape.intermediate),
    }  # fmt: skip
    layers = {f"model.layers.{n}.{name}.weight": size for n in range(shape.layers) for name, size in layer.items()}
    return {**layers, "model.embed_tokens.weight": (shape.vocabulary, hidden), "model.norm.weight": (hidden,)}


def random_groups(prompt: int, lengths: list[int], vocabulary: int) -> Groups:
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=draw).tolist()

    return [(tokens(prompt), [tokens(length) for length in lengths])]


def build(shape: ModelShape, kernel: str, device: torch.device, dtype: torch.dtype, recompute: bool) -> torch.nn.Module:
    """The trainer's model with random weights (norms near 1)."""
    from engine.model.build import Computation, build_model

    torch.manual_seed(0)
    model = build_model(shape, Computation(dtype=dtype, recompute=recompute, attention=kernel, device=device))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, device=device)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.05 * noise)
    return model.train()


def chosen(model: torch.nn.Module, groups: Groups, shared: bool) -> Tensor:
    """[T] log-probabilities of all response tokens, with gradients."""
    from engine.model.build import logits
    from engine.model.layout import layout
    from engine.model.logprobs import token_logprobs

    row = layout(groups, shared).to(next(model.parameters()).device)
    return token_logprobs(logits(model, row), row.targets, 1.0, entropy=False)[0]


def reference(weights: dict[str, Tensor], prompt: list[int], response: list[int], shape: ModelShape) -> Tensor:
    """[T] log-probabilities of one response by a plainly written Qwen3: fp32, one sequence, the full causal mask."""
    device = weights["model.norm.weight"].device
    ids = torch.tensor(prompt + response, device=device)
    angle = torch.outer(torch.arange(len(ids), device=device).float(), frequencies(shape).to(device)).repeat(1, 2)
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        own = {
            n.removeprefix(f"model.layers.{layer}."): w
            for n, w in weights.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        x = x + attention(own, norm(x, own["input_layernorm.weight"], shape), angle, shape)
        h = norm(x, own["post_attention_layernorm.weight"], shape)
        gate = h @ own["mlp.gate_proj.weight"].T
        up = h @ own["mlp.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    scored = norm(x, weights["model.norm.weight"], shape)[len(prompt) - 1 : -1]
    logs = torch.log_softmax(scored @ weights["model.embed_tokens.weight"].T, -1)
    return logs.gather(-1, ids[len(prompt) :, None])[:, 0]


def frequencies(shape: ModelShape) -> Tensor:
    return shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)


def norm(x: Tensor, weight: Tensor, shape: ModelShape) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps) * weight


def attention(own: dict[str, Tensor], x: Tensor, angle: Tensor, shape: ModelShape) -> Tensor:
    q, k, v = (
        (x @ own[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, shape.head_dim)).transpose(0, 1) for n in "qkv"
    )
    q, k = (turned(norm(y, own[f"self_attn.{n}_norm.weight"], shape), angle) for n, y in (("q", q), ("k", k)))
    k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 0) for y in (k, v))
    hidden = torch.ones(len(x), len(x), device=x.device, dtype=torch.bool).triu(1)
    seen = (q @ k.transpose(1, 2) * shape.head_dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    return (seen @ v).transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotary positions: halves of the head as real and imaginary parts."""
    a, b = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


if __name__ == "__main__":
    main()
