"""What the benchmarks share."""

from __future__ import annotations

from pathlib import Path

from engine.base_model.warmup import ensure_quickstart_model
from engine.recipe import HOME


def quickstart_model() -> Path:
    """The quickstart's base model: cached, or made first (one to two minutes)."""
    return ensure_quickstart_model(Path("runs/models"), HOME / "data/addition_train.jsonl")
