"""Floating-point operations of a training micro-step, counted from the model's sizes, and the peak of known devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.model.shape import ModelShape

if TYPE_CHECKING:
    from engine.model.layout import Segment


def forward_flops(sizes: ModelShape, tokens: int, pairs: float, scored: int) -> float:
    """2 · S · (weights of the layers' linear maps) + 4 · A · layers · heads · head_dim + 2 · T · hidden · vocabulary

    for S computed tokens, A visible (query, key) pairs and T scored tokens. A multiply-add counts as two operations.
    Only the experts that compute a token count. Norms, rotary positions, activations, routers and the softmax are left
    out; they are a few per cent.
    """
    attention = sizes.hidden * sizes.head_dim * (2 * sizes.heads + 2 * sizes.kv_heads)
    sparse = len(sizes.experts.layers) if sizes.experts is not None else 0
    inner = (sizes.layers - sparse) * sizes.intermediate
    inner += sparse * sizes.experts.per_token * sizes.experts.intermediate if sizes.experts is not None else 0
    weights = sizes.layers * attention + 3 * sizes.hidden * inner
    visible = 4 * pairs * sizes.layers * sizes.heads * sizes.head_dim
    return 2 * tokens * weights + visible + 2 * scored * sizes.hidden * sizes.vocabulary


def training_flops(sizes: ModelShape, segments: Iterable[Segment]) -> float:
    """Return the operations of forward and backward (twice the forward) of a micro-batch, without recomputation and
    without filler (segments without a response).

    A prompt of P tokens has P(P+1)/2 visible pairs, and a response of R tokens after it R·P + R(R+1)/2.
    """
    done = 0.0
    for segment in segments:
        if segment.responses:
            prompt = segment.prompt
            pairs = prompt * (prompt + 1) / 2 + sum(size * (prompt + (size + 1) / 2) for size in segment.responses)
            done += 3 * forward_flops(sizes, segment.length, pairs, sum(segment.responses))
    return done


def micro_step(sizes: ModelShape, prompt: int, response: int, group: int, shared: bool) -> float:
    """`training_flops` of a group whose responses have equal length.

    With a prompt of P tokens and G responses of R tokens (Periodic Asynchrony §4.2, eq. 10-13), T = G·R and

        shared    S = P + G·R     A = P(P+1)/2 + G·(R·P + R(R+1)/2)
        separate  S = G·(P + R)   A = G·(P(P+1)/2 + R·P + R(R+1)/2)
    """
    from engine.model.layout import Segment  # imported here, because importing torch takes seconds

    if shared:
        return training_flops(sizes, [Segment(0, prompt, (response,) * group)])
    return group * training_flops(sizes, [Segment(0, prompt, (response,))])


PEAKS = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12, "H200": 989e12, "H20": 148e12,
    "A100": 312e12,
    "Ascend910B2": 353.9e12, "Ascend910B3": 294.9e12, "Ascend910B4": 245.8e12,
    "Ascend910_938": 353.9e12, "Ascend910_939": 353.9e12,
}  # fmt: skip
"""Dense bf16 operations per second, by a part of the device's name; the first match counts.

NVIDIA: from the data sheets, whose figures with sparsity are twice as high. Ascend: `tensor_cast/device.py` of Huawei's
msmodeling, for a 910B of Atlas 800 A2 with 376, 313 and 280 TFLOPS in fp16, and for one of the two dies of a 910C
(Atlas 800 A3, 752 TFLOPS), each of which torch_npu shows as a device. That file does not say which chip name belongs to
which figure. The mapping here follows from the number of cores (24 or 20) and their clock, and is not confirmed.
"""


def peak_of(device: str) -> float | None:
    """Return the operations per second of a device, by its name in torch; None if it is not in PEAKS."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)


def flop_utilisation(operations: float, seconds: float, device: str) -> float | None:
    """Return the model FLOP utilisation, 0 to 1: operations per second over the peak. None for an unknown device."""
    peak = peak_of(device)
    return None if peak is None else operations / seconds / peak
