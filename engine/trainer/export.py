"""Exports the final policy as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from engine.model.tri_model import TriModel
from engine.ranks.rank_group import RankGroup
from engine.run.files import sync_all, sync_folder
from engine.wire.weights.hf_folder import join_folders, write_sharded

KEPT = frozenset({"", ".json", ".jinja", ".txt", ".md", ".model", ".tiktoken", ".bpe", ".spm", ".vocab"})
"""Suffixes of a model's configuration, tokenizer and text files. Any other file may contain weights in some format,
which a loader could prefer to the policy's."""


def export_policy(
    models: TriModel, ranks: RankGroup, base: Path, target: Path, fence: Callable[[], None] = lambda: None
) -> None:
    """Write the policy's weights to `target`, with the base model's configuration and tokenizer. config.json names the
    tensors' dtype, so that loaders keep it.

    One rank of each pipeline stage gathers and writes the stage's tensors. The folder appears once it is complete and
    on disk. Collective over all ranks. `fence` raises if this process may no longer write the run.
    """
    partial = target.with_name(f".{target.name}.partial")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, ignore=_ignored)
        _write_dtype(partial / "config.json", next(models.policy.parameters()).dtype)
    ranks.barrier()
    if ranks.exports:
        tensors = models.export()
        if ranks.writes:
            write_sharded(partial / f"stage-{ranks.stage:03d}", tensors)
        else:
            for _ in tensors:
                pass  # sends its shards to the rank that writes
    ranks.barrier()
    if ranks.rank == 0:
        join_folders(partial, sorted(partial.glob("stage-*")))
        sync_all(partial)
        fence()
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_folder(target.parent)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Return the files of the base model's folder that do not belong to the policy: hidden files, weights in any
    format, their indices, and adapters, which loaders would add to the policy."""
    files = {name for name in names if not (Path(folder) / name).is_dir()}
    other = {name for name in files if Path(name).suffix.lower() not in KEPT or name.endswith(".index.json")}
    return other | {name for name in names if name.startswith(".") or name == "adapter_config.json"}


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write the tensors' dtype into config.json, under the keys it already uses: transformers 4 uses another key."""
    found = json.loads(config.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in found] or ["dtype"]
    config.write_text(json.dumps(found | dict.fromkeys(keys, str(dtype).removeprefix("torch.")), indent=2) + "\n")
