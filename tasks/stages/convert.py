"""The base model: its folder, and the conversion of its weights into Megatron's layout and back, checked against
Hugging Face's logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import INPUTS, NO_CACHE, TASK_SOURCE

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.errors import counted
from engine.model.shape import content_hash, read_shape
from engine.run.commands import conversion_command
from engine.run.folder import RunFolder
from engine.run.memory import total_parameters
from engine.run.process import Child, run_to_end
from engine.types import JsonObject
from tasks.stages.input_checks import with_model_folder
from tasks.terminal.progress_display import show_progress, since_now, written
from tasks.tracking.artifact_cells import code_span, table_as_markdown
from tasks.tracking.code_version import code_hash


@task(name="base model", cache_policy=NO_CACHE)
def base_model(config: Config) -> Config:
    """The config with `model.path` set to a checked Hugging Face folder."""
    config = with_model_folder(config)
    shape = read_shape(Path(config.model.path))
    create_markdown_artifact(
        f"{code_span(config.model.path)}: {shape.architecture}, {counted(shape.layers, 'layer')} of "
        f"{shape.hidden}, vocabulary {shape.vocabulary}, context {shape.context}",
        key="base-model",
        description="The model that training starts from",
    )
    return config


LIMIT_S = 1800.0
"""Time limit of the conversion in seconds, apart from the model's size."""
LIMIT_PER_GIB_S = 60.0
"""What each GiB of the model's files adds to the limit: they are read three times."""


@task(name="convert", cache_policy=INPUTS - "log" + TASK_SOURCE, persist_result=True, result_serializer="json")
def convert(model: str, model_hash: str, code: str, log: Path) -> JsonObject:
    """Run `engine.tools.conversion` in a separate process; returns its report. The hashes are only cache keys.

    Raises BadInput for an unusable folder, MetronomeError if logits or tensors differ, DeadlineError at the time limit.
    """
    file = log.with_suffix(".progress")
    limit = conversion_limit_s(Path(model))
    child = Child("convert", conversion_command(model, file), log)
    late = f'the conversion of {model} did not finish within {limit:.0f} s (model.convert = "skip" leaves it out); '
    try:
        with show_progress("convert", written(file, "loading torch, Megatron and transformers")):
            run_to_end(child, limit, f"{late}its log: {log}")
    finally:
        file.unlink(missing_ok=True)
    report: JsonObject = json.loads(log.read_text().strip().rpartition("\n")[2])
    return report


def conversion_limit_s(model: Path) -> float:
    """The time limit in seconds of the conversion of a model folder."""
    return LIMIT_S + LIMIT_PER_GIB_S * sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**30


def convert_model(config: Config) -> JsonObject:
    """The report of `convert` on a run's model, from the cache if the model and the code are unchanged. With
    model.convert = "skip", config.json and the tokenizer are read, and the report has the parameters only.

    Raises BadInput if a file can't be used, and the errors of `convert`.
    """
    model = Path(config.model.path)
    if config.model.convert == "skip":
        Tokenizer(model, config.rollout.stop)
        return {"parameters": total_parameters(read_shape(model))}
    with show_progress("convert", since_now("reading the model's files")):
        digest = content_hash(model)
    log = RunFolder(config.folder).logs / "convert.log"
    found: JsonObject = convert(str(model), digest, code_hash("model", "platform"), log)
    return found


def describe_report(report: Mapping[str, Any]) -> str:
    """The report in one line for the console. This also creates the artifact, because the body of a cached task does
    not run."""
    if "max_logit_error" not in report:
        return f'{report["parameters"]:,} parameters; not compared with Hugging Face (model.convert = "skip")'
    create_markdown_artifact(table_as_markdown(report), key="conversion", description="Hugging Face against Megatron")
    return (
        f"{report['parameters']:,} parameters; logits within {report['max_logit_error']:.1e} of Hugging Face; "
        f"{report['weight_bytes'] / 2**30:.2f} GiB of weights converted within {report['peak_bytes'] / 2**30:.2f} GiB"
    )
