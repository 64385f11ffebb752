"""What a run starts from: name, model, problems, reward."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from engine.config.base import Table


class Run(Table):
    """The run as a whole."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$")
    """Folder name under `output`. Empty: recipe name and start time, so that a second run never meets the first."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompt order and sampling."""
    output: str = "runs"
    """Folder that holds run folders, base models, caches and the MLflow store."""


class Model(Table):
    """The base model."""

    path: str = "quickstart"
    """A Hugging Face folder, or "quickstart": the tiny Qwen3 that Metronome warms up itself (cached under `run.output`)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rollout instances; bfloat16 needs rollout.engine = "vllm". On CPU fp32: bf16 moves log-probabilities by 0.15."""


class Data(Table):
    """Problem sets in DeepScaleR's schema (problem, answer, solution): .json, .jsonl, .parquet or a folder of them."""

    train: str = "data/addition_train.jsonl"
    """Problems to train on. Relative paths are tried from the current folder, then from Metronome's own."""
    heldout: str = "data/addition_heldout.jsonl"
    """Problems never trained on; what `evaluate.benchmark = ""` evaluates."""
    prompt_template: str = "{problem}"
    """Text with `{problem}` in it, or "chat": the tokenizer's chat template around one user message."""

    @model_validator(mode="after")
    def _template(self) -> Data:
        if self.prompt_template != "chat" and "{problem}" not in self.prompt_template:
            raise ValueError('data.prompt_template must contain "{problem}" or be "chat"')
        return self


class Reward(Table):
    """How a response is scored."""

    function: str = "exact"
    """"math", "exact", "file.py:function" or "package.module:function"."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one call may take before its worker is killed and the response scores 0. math-verify needs milliseconds."""
    on_error: Literal["stop", "zero"] = "stop"
    """A reward that raises or returns the wrong number: stop the run after a checkpoint, or score 0 and count it."""
    workers: PositiveInt = 1
    """Verifier processes. One keeps up with a small model; raise it when verifying is slow."""
