"""A Llama-shaped Hugging Face model for rollouts: prefill of one prompt, decoding of many slots.

The modules of transformers cost more than the arithmetic of a small model, so the forward pass is written out here over
the same parameters. Where several projections are computed as one, their parameters become views of the joint tensor.

Linear maps use oneDNN where it is faster than MKL, which `F.linear` calls on a CPU. MKL uses AVX-512 only on Intel
CPUs: on one core of an AMD EPYC of 2024 it reaches 90 GFLOP/s and oneDNN 210, with the same fp32 arithmetic. torch
includes both. In fp32 it exposes oneDNN through an operator that its compiler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.instance.embedded.cache import KeyValueCache, Prefill
from engine.model.shape import end_of_sequence_ids

ROWS = 32
"""Fewest rows for oneDNN. With fewer, its overhead of about 10 µs exceeds the time it saves (measured, hidden 128)."""


def onednn_available() -> bool:
    """Whether this torch has oneDNN's operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


ONEDNN = onednn_available()


def bfloat16_available() -> bool:
    """Whether this processor multiplies bf16 matrices itself. oneDNN also emulates it, slower than fp32."""
    return ONEDNN and torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [n, in] · weight [out, in]ᵀ + bias [out] in fp32, without gradients.

    A row of the result depends only on n and the same row of x.
    """
    if ONEDNN and len(x) >= ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


SUPPORTED = ("qwen3", "qwen2", "llama")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")

SCORED_ROWS = 256
"""Number of prompt tokens whose logits are computed at a time."""

QUERIES = 128
"""Number of a piece's tokens whose attention to the tokens before them is computed at a time: all scores of a long
piece take gigabytes."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Computes attention: (layer index, q [n, heads, dim], k and v [n, kv heads, dim]) -> [n, heads * dim]."""


class RolloutModel:
    """Weights and forward passes of one causal language model on the CPU. Only one thread may use it.

    With weights in bf16 the linear maps compute in bf16 (`Linear`). All else is fp32: hidden states between layers,
    norms, attention with its keys and values, and logits.
    """

    def __init__(self, folder: str, max_context: int, dtype: torch.dtype = torch.float32) -> None:
        """Load a Hugging Face folder. Raise BadInput unless the model is SUPPORTED, with full attention and static
        rotary positions, and if this processor has no products of the dtype."""
        if dtype is torch.bfloat16 and not bfloat16_available():
            raise BadInput(
                'model.dtype = "bfloat16": this processor multiplies no bf16 matrices (AVX512_BF16 or AMX), so the '
                'embedded engine takes "float32" on it'
            )
        self.hf = _load_model(folder, dtype)
        config = self.hf.config
        base = self.hf.model
        self.vocabulary: int = self.hf.lm_head.weight.shape[0]
        self.stop_ids = _stop_ids(Path(folder))
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = base.layers[0].self_attn.head_dim
        self.layers = [Layer(block) for block in base.layers]
        self.embed: Tensor = base.embed_tokens.weight
        self.head = Linear(self.hf.lm_head)
        self.norm = Norm(base.norm)
        self.cos, self.sin = _rotary_tables(base.rotary_emb, max_context)

    def prefill(self, pieces: Sequence[tuple[Sequence[int], Prefill | None]]) -> list[Prefill]:
        """Compute prompts, or pieces of them, in one forward pass: the ids of each, and the tokens that stand before
        them."""
        states, hidden = self._prompt_states(pieces)
        ends = torch.tensor([len(ids) for ids, _ in pieces]).cumsum(0) - 1
        logits = self._logits(hidden[ends])
        # each with logits of its own: one that is kept must not keep those of all
        return [Prefill(*one, after.clone()) for one, after in zip(states, logits, strict=True)]

    def scored_prefill(self, ids: list[int]) -> tuple[Prefill, list[float]]:
        """Return `prefill` and the log-probabilities (temperature 1) of ids[1:], each given the ids before it.

        One forward pass computes both.
        """
        ((keys, values),), hidden = self._prompt_states([(ids, None)])
        targets = torch.tensor(ids[1:])[:, None]
        scores = [
            value  # in pieces: all logits of a long prompt with a large vocabulary take gigabytes
            for rows, wanted in zip(hidden[:-1].split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
            for value in self._logits(rows).log_softmax(-1).gather(1, wanted)[:, 0].tolist()
        ]
        return Prefill(keys, values, self._logits(hidden[-1:])[0]), scores

    def _prompt_states(
        self, pieces: Sequence[tuple[Sequence[int], Prefill | None]]
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Return keys and values [layers, kv heads, dim, tokens] of each piece, and the hidden states [rows, hidden] of
        all of them, one after the other."""
        lengths = [len(ids) for ids, _ in pieces]
        keys = []
        values = []

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k.permute(1, 2, 0))
            values.append(v.permute(1, 2, 0))
            rows = zip(q.split(lengths), k.split(lengths), v.split(lengths), pieces, strict=True)
            return torch.cat(
                [
                    _causal_attention(*qkv) if before is None else _attention_after(before, index, *qkv)
                    for *qkv, (_, before) in rows
                ]
            )

        begun = [before.length if before is not None else 0 for _, before in pieces]
        positions = [torch.arange(begin, begin + length) for begin, length in zip(begun, lengths, strict=True)]
        hidden = self._forward(torch.tensor([one for ids, _ in pieces for one in ids]), torch.cat(positions), attend)
        joint = (torch.stack(one).split(lengths, 3) for one in (keys, values))
        return list(zip(*joint, strict=True)), hidden

    def decode(self, tokens: Tensor, positions: Tensor, cache: KeyValueCache, length: int) -> Tensor:
        """Add one token to each of the cache's first n slots. Return the logits [n, vocabulary] of the tokens after
        these.

        tokens [n] are placed at positions [n], all below `length`. Attention reads the first `length` entries of a slot
        and masks those after the row's position.
        """
        n = len(tokens)
        rows = torch.arange(len(tokens))
        scale = self.head_dim**-0.5
        ahead = torch.arange(length) > positions[:, None]
        mask = torch.zeros(n, length).masked_fill_(ahead, float("-inf"))
        mask = mask.repeat_interleave(self.kv_heads, 0)[:, None]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys = cache.keys[index, :n]
            values = cache.values[index, :n]
            keys[rows, :, :, positions] = k
            values[rows, :, :, positions] = v
            keys, values = (x[..., :length].flatten(0, 1) for x in (keys, values))
            grouped = q.reshape(n * self.kv_heads, -1, self.head_dim)
            scores = torch.baddbmm(mask, grouped, keys, alpha=scale)
            return torch.bmm(scores.softmax(-1), values.transpose(1, 2)).view(n, -1)

        return self._logits(self._forward(tokens, positions, attend))

    def refresh(self) -> None:
        """Recompute the values derived from the Hugging Face parameters. Call this after they have changed in place."""
        for layer in self.layers:
            layer.refresh()
        self.head.refresh()
        self.norm.refresh()

    def _forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = F.embedding(ids, self.embed).float()
        # one copy per head here saves a slow broadcast over short rows in every layer
        heads = self.layers[0].heads + self.kv_heads
        cos, sin = (table[positions].expand(-1, heads, -1).contiguous() for table in (self.cos, self.sin))
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(index=index, hidden=hidden, cos=cos, sin=sin, attend=attend)
        return self.norm(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head.in_fp32(hidden)


class Layer:
    """One decoder block over rows of hidden states [n, hidden]. `attend` decides which rows attend to which."""

    def __init__(self, block: Any) -> None:  # noqa: ANN401
        """`block`: a decoder block of a Hugging Face model. Some lack the norms of queries and keys."""
        attention = block.self_attn
        mlp = block.mlp
        self.attention = attention
        self.head_dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = Linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Linear(attention.o_proj)
        self.gate_up = Linear(mlp.gate_proj, mlp.up_proj)
        self.down = Linear(mlp.down_proj)
        self.activation = mlp.act_fn
        self.norm_in = Norm(block.input_layernorm)
        self.norm_mlp = Norm(block.post_attention_layernorm)
        self.norm_qk = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.refresh()

    def refresh(self) -> None:
        """Recompute the values derived from the parameters: of each part, and the weight [heads + kv heads, dim] of q's
        and k's norm."""
        for part in (self.qkv, self.out, self.gate_up, self.down, self.norm_in, self.norm_mlp):
            part.refresh()
        if self.norm_qk is not None:
            q = self.attention.q_norm.weight
            k = self.attention.k_norm.weight
            self.norm_qk.weight = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)]).float()

    def forward(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the block's output [n, hidden]; cos and sin are [n, heads + kv heads, dim]."""
        q, k, v = self._queries_keys_values(self.norm_in(hidden), cos, sin)
        hidden = hidden + self.out(attend(index, q, k, v))
        gate, up = self.gate_up(self.norm_mlp(hidden)).chunk(2, -1)
        return hidden + self.down(self.activation(gate) * up)

    def _queries_keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joint = self.qkv(x).float().view(len(x), -1, self.head_dim)
        qk = joint[:, : -self.kv_heads]
        v = joint[:, -self.kv_heads :]
        if self.norm_qk is not None:
            qk = self.norm_qk(qk)
        # rotate_half(x) * sin of the Hugging Face models, with the sign in the sine
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        return qk[:, : self.heads], qk[:, self.heads :], v


class Linear:
    """A linear map x [n, in] → x · weightᵀ + bias [n, out], or several as one, in the dtype of the weights.

    In bf16 x is rounded, products are summed in fp32, and the sums are rounded. oneDNN reads these weights in an order
    of its own; putting them into it at each product takes as long as the product does with 32 rows, so they are kept in
    it.
    """

    def __init__(self, *parts: nn.Linear) -> None:
        """The parts' parameters become views of the joint weight and bias."""
        self.weight, self.bias = _fuse(*parts) if len(parts) > 1 else (parts[0].weight, parts[0].bias)
        self._ordered = self.weight
        self.refresh()

    def refresh(self) -> None:
        """Put changed weights into oneDNN's order."""
        if self.weight.dtype is torch.bfloat16:
            self._ordered = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the map of x."""
        if self.weight.dtype is torch.float32:
            return onednn_linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self._ordered, self.bias, "none", [], "")

    def in_fp32(self, x: Tensor) -> Tensor:
        """Return the map of x in fp32, for a map without bias. In bf16 a second product computes what the first one
        lost by rounding: the negated first result is added to its sums before they are rounded."""
        if self.weight.dtype is torch.float32:
            return self(x)
        negated = self(-x)
        lost = torch.ops.mkldnn._linear_pointwise.binary(
            X=x.bfloat16(), other=negated, W=self._ordered, B=None, attr="add"
        )
        return lost.float().sub_(negated)


class Norm:
    """RMSNorm: x / sqrt(mean(x²) + eps) * weight, over the last dimension. The weight may have more dimensions."""

    def __init__(self, norm: Any) -> None:  # noqa: ANN401
        """`norm`: an RMSNorm of a Hugging Face model."""
        self._source = norm
        self.weight = norm.weight.float()
        self.eps = torch.tensor(float(norm.variance_epsilon))

    def refresh(self) -> None:
        """Read the weight, in fp32."""
        self.weight = self._source.weight.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x, same shape. This makes a step a few per cent faster than F.rms_norm with its seven
        operations."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, size, size, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention [n, heads * dim] of one sequence: q [n, heads, dim], k and v [n, kv heads, dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def _attention_after(before: Prefill, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention [n, heads * dim] of a piece with tokens before it, in layer `index`: q [n, heads, dim], k
    and v [n, kv heads, dim].

    With few queries and the layout of the cache this takes a quarter of the time of torch's attention with a mask.
    """
    heads, width = k.shape[1:]
    keys = torch.cat([before.keys[index], k.permute(1, 2, 0)], 2)
    values = torch.cat([before.values[index], v.permute(1, 2, 0)], 2)
    done = []
    for begin in range(0, len(q), QUERIES):
        rows = q[begin : begin + QUERIES]
        n = len(rows)
        seen = before.length + begin + n
        ahead = torch.ones(n, seen, dtype=torch.bool).triu_(seen - n + 1)
        mask = torch.zeros(n, seen).masked_fill_(ahead, float("-inf")).repeat(q.shape[1] // heads, 1)
        grouped = rows.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores = torch.baddbmm(mask, grouped, keys[:, :, :seen], alpha=width**-0.5)
        out = torch.bmm(scores.softmax(-1), values[:, :, :seen].transpose(1, 2))
        done.append(out.unflatten(1, (-1, n)).permute(2, 0, 1, 3).flatten(1))
    return torch.cat(done)


def _load_model(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    if not (Path(folder) / "config.json").is_file():
        raise BadInput(f"--model {folder}: no config.json there; a Hugging Face model folder is needed")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(f"--model {folder}: {error}") from None
    if found["missing_keys"]:  # transformers would continue with random weights
        raise BadInput(f"--model {folder}: its files lack {sorted(found['missing_keys'])[0]}")
    _check_supported(model, folder)
    return model.eval().requires_grad_(False)


def _check_supported(model: PreTrainedModel, folder: str) -> None:
    kind = model.config.model_type
    if kind not in SUPPORTED:
        raise BadInput(f"--model {folder}: model_type {kind!r}; the embedded engine runs {', '.join(SUPPORTED)}")
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise BadInput(f"--model {folder}: sliding-window attention; the embedded engine runs full attention only")
    if model.model.rotary_emb.rope_type not in STATIC_ROPE:
        raise BadInput(
            f"--model {folder}: rope_type {model.model.rotary_emb.rope_type!r} changes with the length; "
            f"the embedded engine runs {', '.join(STATIC_ROPE)}"
        )


def _stop_ids(folder: Path) -> frozenset[int]:
    """Return the end-of-sequence ids of the model, and of its tokenizer, if there is one."""
    has_one = (folder / "tokenizer_config.json").is_file()
    return end_of_sequence_ids(folder).union(Tokenizer(folder).stop_ids if has_one else ())


def _rotary_tables(rotary: nn.Module, length: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, 1, dim] for every position. The first half of sin is negated, see Layer."""
    cos, sin = rotary(torch.empty(0), torch.arange(length)[None])
    half = sin.shape[-1] // 2
    sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
    return cos[0, :, None].contiguous(), sin[:, None]


def _fuse(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of one projection with the outputs of all parts. The parts' parameters become views of it,
    so that updating them updates it."""
    biases = [part.bias for part in parts if part.bias is not None]
    return _join_as_views([part.weight for part in parts]), _join_as_views(biases) if biases else None


def _join_as_views(parameters: Sequence[Tensor]) -> Tensor:
    """Return the parameters concatenated along their first dimension. They become views of the result."""
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return joined
