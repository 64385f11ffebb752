"""Run folders without a run: every state file that an orchestrator, its trainer and a flow write."""

import pickle
import shutil

from engine.config import Config, Run, Train
from engine.errors import MetronomeError
from engine.orchestrator import in_run_evaluation
from engine.run import checkpoint_files
from engine.run.fence import Fence
from engine.run.files import append_line, write_json
from engine.run.folder import RunFolder
from engine.run.identity import claim_run_id, read_run_id
from engine.run.run_start import RunStart
from engine.run.trace import Trace
from tasks.finished_stages import Stages, count_attempt

STEPS = 4


def a_checkpoint(root, step, run="", content=b"weights"):
    """A whole checkpoint of one file of tensors."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    partial = checkpoint_files.partial_of(checkpoint_files.folder_of(root, step))
    partial.mkdir(parents=True)
    index = Metadata({"policy.weight": TensorStorageMetadata(TensorProperties(), (3,), [])}, storage_data={})
    (partial / checkpoint_files.INDEX).write_bytes(pickle.dumps(index))
    (partial / "__0_0.distcp").write_bytes(content * 100 + str(step).encode())
    write_json(partial / "state.json", {"step": step})
    target = checkpoint_files.folder_of(root, step)
    checkpoint_files.publish_checkpoint(
        partial=partial, target=target, step=step, figures={"reward_mean": 0.5}, run=run
    )
    return target


def finished(output):
    """The folder of a run that ended."""
    config = Config(run=Run(name="finished", output=str(output)), train=Train(steps=STEPS))
    folder = RunFolder(config.folder)
    claim_run_id(folder.path, config, resume=False)
    folder.fence = Fence.begin_attempt(folder.path)
    Fence.begin_attempt(folder.path, "flow")
    RunStart().write(folder.path)
    folder.create(config, resume=False)
    count_attempt(folder, "training", 3, "started by a person")
    trace = Trace(folder.trace, "orchestrator")
    for step in range(STEPS):
        for name in ("sync", "train", "rollout", "update"):
            trace.add_span(name, 10.0 * step, 10.0 * step + 5, lane="trainer-0", step=step)
        append_line(folder.steps, {"step": step, "step_s": 1.0, "pool_size": 1, "reward_mean": 0.5})
    trace.flush()
    row = {"step": 3, "weight_version": 3, "benchmark": "heldout", "model": "base", "protocol": {}, "in_run": True}
    append_line(folder.evaluations, row | {"table": "evaluations/heldout-v000003-000000.jsonl"})
    in_run_evaluation.dropped_file(folder).parent.mkdir()
    append_line(in_run_evaluation.dropped_file(folder), {"weight_version": 2, "reason": "late"})
    for step in (2, 4):
        a_checkpoint(folder.checkpoints, step, read_run_id(folder.path))
    Stages(folder).once("train", lambda: STEPS)
    return folder


def interrupted(output):
    """The folder of a run that was killed in its last step, and told why."""
    folder = finished(output)
    shutil.rmtree(folder.checkpoints / "step-000004")
    folder.stages.unlink()
    folder.write_failure(MetronomeError("it was ended"))
    return folder
