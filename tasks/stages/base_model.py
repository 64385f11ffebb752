"""Base model: the folder that training starts from."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from engine.config import Config
from engine.errors import counted
from engine.model.shape import read_shape
from tasks.stages.input_checks import with_model_folder
from tasks.tracking.artifact_cells import code_span


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
