"""The kernel of `engine.model.kernels.merged` in plain torch operations, used to test the device kernels. It works on
every device and in every dtype, and holds all scores of a sequence in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.kernels.merged import Sequences


@dataclass(frozen=True)
class Plain:
    """Softmax attention of each sequence, in fp32 or wider."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """See `merged.VarlenKernel`."""
        done = []
        for query, key, value, hidden in _each(q, k, v, sequences):
            scores = _scores(query, key, hidden, self.scale)
            lse = scores.logsumexp(-1)
            out = torch.einsum("hgqk,khd->qhgd", (scores - lse[..., None]).exp(), value)
            done.append((out.flatten(1, 2).to(q.dtype), lse.flatten(0, 1).T))
        out, lse = (torch.cat(parts) for parts in zip(*done, strict=True))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `merged.VarlenKernel`. With p = exp(score − lse): dv = pᵀ·grad, d score = p · (grad·v − grad·out)."""
        lengths = list(sequences.queries)
        done = []
        for (query, key, value, hidden), *rest in zip(
            _each(q, k, v, sequences), *(x.split(lengths) for x in (grad, out, lse)), strict=True
        ):
            above, result = (x.to(query.dtype).unflatten(1, query.shape[1:3]) for x in rest[:2])
            total = rest[2].T.unflatten(0, query.shape[1:3])
            shares = (_scores(query, key, hidden, self.scale) - total[..., None]).exp()
            along = torch.einsum("qhgd,khd->hgqk", above, value)
            to_scores = self.scale * shares * (along - torch.einsum("qhgd,qhgd->hgq", above, result)[..., None])
            to_query = torch.einsum("hgqk,khd->qhgd", to_scores, key).flatten(1, 2)
            to_key = torch.einsum("hgqk,qhgd->khd", to_scores, query)
            to_value = torch.einsum("hgqk,qhgd->khd", shares, above)
            done.append((to_query, to_key, to_value))
        dq, dk, dv = (torch.cat(parts).to(q.dtype) for parts in zip(*done, strict=True))
        return dq, dk, dv


def _each(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield (q [L, key-value heads, heads per key-value head, d], k, v [K, key-value heads, d], hidden [L, K] bool or
    None) of each sequence, in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1)).split(list(sequences.queries))
    keys, values = (x.to(wide).split(list(sequences.keys)) for x in (k, v))
    for query, key, value in zip(queries, keys, values, strict=True):
        mask = torch.ones(len(query), len(key), dtype=torch.bool, device=q.device)
        yield query, key, value, mask.triu(1 + len(key) - len(query)) if sequences.causal else None


def _scores(query: Tensor, key: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """[key-value heads, heads per key-value head, L, K] scores, −∞ where hidden."""
    scores = scale * torch.einsum("qhgd,khd->hgqk", query, key)
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))
