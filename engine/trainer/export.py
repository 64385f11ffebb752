"""Writing the final policy as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from engine.model.tri_model import TriModel
from engine.run.files import sync_all, sync_folder
from engine.trainer.rank_group import RankGroup
from engine.wire.weights.hf_folder import join, write_sharded


def export(
    models: TriModel, ranks: RankGroup, base: Path, target: Path, fence: Callable[[], None] = lambda: None
) -> None:
    """Write the policy's weights to `target`, with the base model's configuration and tokenizer.

    One rank of each pipeline stage gathers and writes the stage's tensors. The folder appears once it is complete and
    on the disk. A collective of all ranks. `fence` raises if this process may not write the run any more.
    """
    partial = target.with_name(f".{target.name}.partial")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(base, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", ".*"))
    ranks.barrier()
    if ranks.exports:
        tensors = models.export()
        if ranks.writes:
            write_sharded(partial / f"stage-{ranks.stage:03d}", tensors)
        else:
            for _ in tensors:
                pass  # gives its shards to the rank that writes
    ranks.barrier()
    if ranks.rank == 0:
        join(partial, sorted(partial.glob("stage-*")))
        sync_all(partial)
        fence()
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_folder(target.parent)
