"""Convert: Hugging Face weights into Megatron's layout and back, checked against Hugging Face logits."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import INPUTS, TASK_SOURCE

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.commands import conversion_command
from engine.run.process import Child
from engine.types import JsonObject
from tasks import stage_progress
from tasks.artifact_cells import markdown
from tasks.orchestrator_process import last_error
from tasks.progress_display import showing

LIMIT_S = 1800.0
"""Time limit of the conversion in seconds. A tiny model takes 10 s; a large one is read from disk three times."""


@task(name="convert", cache_policy=INPUTS - "log" + TASK_SOURCE, persist_result=True, result_serializer="json")
def convert(model: str, model_hash: str, code: str, log: Path) -> JsonObject:
    """Run `engine.tools.conversion` in a separate process; returns its report. The hashes are only cache keys.

    Raises BadInput for an unusable folder, MetronomeError if logits or tensors differ, DeadlineError at the time limit.
    """
    child = Child("convert", conversion_command(model), log)
    try:
        with showing("convert", stage_progress.conversion(log)):
            code_ = child.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"the conversion of {model} did not finish within {LIMIT_S:.0f} s; its log: {log}"
        ) from None
    finally:
        child.stop()
    if code_:
        raise (BadInput if code_ == 2 else MetronomeError)(last_error(child))
    report: JsonObject = json.loads(log.read_text().strip().rpartition("\n")[2])
    return report


def describe(report: Mapping[str, Any]) -> str:
    """The report in one line for the console. This also creates the artifact, because the body of a cached task does
    not run."""
    create_markdown_artifact(markdown(report), key="conversion", description="Hugging Face against Megatron")
    return (
        f"{report['parameters']:,} parameters; logits within {report['max_logit_error']:.1e} of Hugging Face; "
        f"{report['weight_bytes'] / 2**30:.2f} GiB of weights converted within {report['peak_bytes'] / 2**30:.2f} GiB"
    )
