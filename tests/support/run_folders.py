"""Run folders without a run: every state file that an orchestrator, its trainer and a flow write."""

import pickle
import shutil
import time
from dataclasses import fields, replace

from engine.config import Config, Run, Train
from engine.data.prepared import Prepared, heldout_problems, origin_of, write_prepared
from engine.data.problem_statistics import REPORT
from engine.errors import MetronomeError
from engine.orchestrator import in_run_evaluation
from engine.run import checkpoint_files, run_inputs
from engine.run.files import append_line, write_json
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
from engine.run.progress import Progress, write_progress
from engine.run.run_file import Fence, read_run, update_run
from engine.run.trace import Trace
from engine.types import StepReport
from tasks.attempt import Stages, count_attempt

STEPS = 4
FIGURES = {
    field.name: {"int": 1, "float": 1.5, "list[float]": [0.5]}.get(str(field.type).removesuffix(" | None"))
    for field in fields(StepReport)
    if field.name != "reward_metrics"
}
"""A line of steps.jsonl."""
EVALUATION = {
    **{"benchmark": "heldout", "model": "base", "protocol": {"samples": 2}, "in_run": True, "seconds": 1.5},
    **{
        "problems": 4,
        "unscored_problems": 0,
        "samples": 2,
        "truncated": 1,
        "context_cut": 0,
        "partial_scores": 0,
        "exposed_s": 0.5,
    },
    **dict.fromkeys(
        [f"{name}{end}" for name in ("", "pass_", "maj_") for end in ("ci_low", "ci_high")]
        + ["avg_at_k", "pass_at_k", "maj_at_k"],
        0.5,
    ),
    "against": dict.fromkeys(["weight_version", "better", "worse", "problems"], 1)
    | dict.fromkeys(["difference", "ci_low", "ci_high", "p_value"], 0.5),
    "table": "evaluations/heldout-v000003-000000.jsonl",
}
"""A line of evaluations.jsonl."""


def add_line(file, **row):
    """Append a line with its time to steps.jsonl or evaluations.jsonl."""
    append_line(file, {"ended_s": time.time()} | row)


def a_checkpoint(root, step, run="", content=b"weights", config=None, began=1764332111.1764332):
    """A whole checkpoint of one file of tensors."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    partial = checkpoint_files.partial_of(checkpoint_files.folder_of(root, step))
    partial.mkdir(parents=True)
    index = Metadata({"policy.weight": TensorStorageMetadata(TensorProperties(), (3,), [])}, storage_data={})
    (partial / checkpoint_files.INDEX).write_bytes(pickle.dumps(index))
    (partial / "__0_0.distcp").write_bytes(content * 100 + str(step).encode())
    state = {"step": step, "prompts": None, "prompt_position": None, "model": {}, "inputs": {}, "scheduler": {}}
    told = {} if config is None else state | {"config": config.model_dump(mode="json")}
    write_json(partial / "state.json", {"step": step} | told)
    target = checkpoint_files.folder_of(root, step)
    checkpoint_files.publish_checkpoint(
        partial=partial, target=target, step=step, figures={"reward_mean": 0.5}, run=run, began=began
    )
    return target


def newer_attempt(folder):
    """Begin another attempt at a run, as another flow does. Return its fence."""
    fence = Fence(folder)
    fence.begin_attempt("flow", "")
    return fence


def finished(output):
    """The folder of a run that ended."""
    config = Config(run=Run(name="finished", output=str(output)), train=Train(steps=STEPS))
    folder = RunFolder(config.folder)
    claim_run(config, resume=False)
    folder.create(config, resume=False)
    count_attempt(folder, "training", 3, "started by a person")
    trace = Trace(folder.trace, "orchestrator")
    for step in range(STEPS):
        for name in ("sync", "train", "rollout", "update"):
            trace.add_span(name, 10.0 * step, 10.0 * step + 5, lane="trainer-0", step=step)
        add_line(folder.steps, **FIGURES | {"step": step, "weight_version": step, "versions_seen": [step]})
        append_line(folder.notices, {"stage": "rewards", "text": f"{step} of 4 groups teach nothing", "at": 1.5})
    trace.flush()
    for version in (0, 3):
        add_line(folder.evaluations, **EVALUATION | {"step": version, "weight_version": version})
    in_run_evaluation.dropped_file(folder).parent.mkdir()
    append_line(in_run_evaluation.dropped_file(folder), {"weight_version": 2, "reason": "late", "exposed_s": 1.5})
    for step in (2, 4):
        a_checkpoint(folder.checkpoints, step, read_run(folder.path).id, config=config)
    Stages(folder).once("train", lambda: STEPS)
    part = {"named": "", "hash": "a" * 64, "path": "base"}
    update_run(folder.path, inputs={name: part for name in run_inputs.PARTS})
    problems = heldout_problems(config)
    problems = replace(problems, rows=problems.rows[:4])
    origin = origin_of(config)
    write_prepared(config, Prepared(train=problems, heldout=problems, against=(), overlaps=(), origin=origin))
    write_report(folder.path, "b")
    update_run(folder.path, flow_run="abd5dc41-0c33-4da7-bd1d-bff3ba45a7c2")
    write_progress(folder.progress, Progress("step 4 of 4", 1.0))
    return folder


def write_report(folder, version):
    """data.json with the version of the training set."""
    figures = {"source": "data.jsonl", "content_hash": "a", "version": "other", "rows": 4, "skipped": {}}
    figures |= {"problem_characters": {}, "rejected": []}
    report = {"train": {**figures, "version": version}, "heldout": figures}
    write_json(folder / REPORT, {**report, "compared_with": [], "overlaps": [], "notes": []})


def interrupted(output):
    """The folder of a run that was killed in its last step, and told why."""
    folder = finished(output)
    shutil.rmtree(folder.checkpoints / "step-000004")
    update_run(folder.path, stages={})
    folder.write_failure(MetronomeError("it was ended"))
    return folder
