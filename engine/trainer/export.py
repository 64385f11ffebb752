"""Exports the final policy, or the policy of a checkpoint, as a Hugging Face folder.

`python -m engine.trainer.export CHECKPOINT FOLDER` does the latter, in a process of its own because it sets up
Megatron's parallel state.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException

from engine.config import Config
from engine.errors import BadInput, CheckpointError, DamagedCheckpointError
from engine.model.build import Computation, build_model
from engine.model.hf_weights import export_weights
from engine.model.shape import read_shape
from engine.model.tri_model import TriModel
from engine.platform import get_platform, single_session
from engine.run.checkpoint_files import MARKER, STATE, check_checkpoint, parse_state, read_marker
from engine.run.files import sync_all, sync_folder, write_json
from engine.run.process import report_errors, watch_lifeline
from engine.run.run_inputs import find_inputs
from engine.run.served_model import ORIGIN
from engine.trainer.checkpoint.state import load_policy
from engine.trainer.ranks.rank_group import RankGroup
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
    partial = _partial(target)
    if ranks.rank == 0:
        _begin_folder(base, partial, next(models.policy.parameters()).dtype)
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
        _publish_folder(partial, target, fence)


def export_checkpoint(checkpoint: Path, target: Path) -> None:
    """Write the policy of a checkpoint to `target`, like `export_policy`: the same tensors as those of a run that ends
    there. ORIGIN in the folder names the checkpoint. Needs a `single_session`.

    Raises BadInput if the base model is gone or another one, or has another tokenizer than the checkpoint was trained
    with, DamagedCheckpointError for changed files.
    """
    marker = read_marker(checkpoint)
    assert marker is not None, "only complete checkpoints are exported"
    if (state := parse_state((checkpoint / STATE).read_bytes(), marker)) is None:
        raise DamagedCheckpointError(f"checkpoint {checkpoint}: {STATE} does not match {MARKER} (SHA-256 differs)")
    config = Config.model_validate(state["config"])
    base = Path(config.model.path)
    shape = read_shape(base)
    if json.loads(json.dumps(asdict(shape))) != state["model"]:
        raise BadInput(f"checkpoint {checkpoint} is of another model than its model.path = {config.model.path!r}")
    tokenizer = find_inputs(config, base, ("tokenizer",))["tokenizer"]
    if state["inputs"].get("tokenizer", tokenizer)["hash"] != tokenizer["hash"]:
        raise BadInput(
            f"checkpoint {checkpoint} was trained with another tokenizer, chat template or end-of-sequence tokens than "
            f"those that its base model has now; put the files of {base} back as they were"
        )
    check_checkpoint(checkpoint)
    model = build_model(shape, Computation(dtype=getattr(torch, config.train.dtype)))
    try:
        load_policy(str(checkpoint), model)
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {checkpoint} could not be read: {error}") from error
    partial = _partial(target)
    _begin_folder(base, partial, next(model.parameters()).dtype)
    write_sharded(partial, export_weights(dict(model.named_parameters()), model, shape))
    origin = {"checkpoint": str(checkpoint), "id": marker["id"], "weight_version": marker["weight_version"]}
    write_json(partial / ORIGIN, origin)
    _publish_folder(partial, target)


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def _begin_folder(base: Path, partial: Path, dtype: torch.dtype) -> None:
    """Make the folder with all of the model's files but its weights."""
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base, partial, ignore=_ignored)
    _write_dtype(partial / "config.json", dtype)


def _publish_folder(partial: Path, target: Path, fence: Callable[[], None] = lambda: None) -> None:
    """Put the finished folder in place of `target`, on disk."""
    sync_all(partial)
    fence()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    sync_folder(target.parent)


def _ignored(folder: str, names: list[str]) -> set[str]:
    """Return the files of the base model's folder that do not belong to the policy: hidden files, weights in any
    format, their indices, ORIGIN, and adapters, which loaders would add to the policy."""
    files = {name for name in names if not (Path(folder) / name).is_dir()}
    other = {name for name in files if Path(name).suffix.lower() not in KEPT or name.endswith(".index.json")}
    return other | {name for name in names if name.startswith(".") or name in ("adapter_config.json", ORIGIN)}


def _write_dtype(config: Path, dtype: torch.dtype) -> None:
    """Write the tensors' dtype into config.json, under the keys it already uses: transformers 4 uses another key."""
    found = json.loads(config.read_text())
    keys = [key for key in ("dtype", "torch_dtype") if key in found] or ["dtype"]
    config.write_text(json.dumps(found | dict.fromkeys(keys, str(dtype).removeprefix("torch.")), indent=2) + "\n")


def main() -> int:
    """Export, and return 0, or 2 on bad input, or 1; the reason is on stderr."""
    watch_lifeline()
    checkpoint, target = map(Path, sys.argv[1:])

    def work() -> None:
        with single_session(get_platform("cpu")):
            export_checkpoint(checkpoint, target)

    return report_errors(work)


if __name__ == "__main__":
    sys.exit(main())
