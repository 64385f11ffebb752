"""What a run starts from: name, model, problems, reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from engine.config.table import Table


class Run(Table):
    """The run as a whole."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$")
    """Folder name under `output`. Empty: recipe name and start time, so that a second run never meets the first."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompt order and sampling."""
    output: str = "runs"
    """Folder that holds run folders, base models, caches and the MLflow store."""
    resumes: int = Field(default=3, ge=0)
    """At most so many resumes in a row without a new checkpoint or a finished stage between them: a run that crashes at
    the same point again and again ends as failed. Three outlast a node that is being replaced."""
    dry: bool = False
    """Check layout, memory per device and batch arithmetic, print them and stop.
    Needs no device, no weights and no data."""


class DryRun(Table):
    """What only the dry run (`run.dry`) reads."""

    joining: int = Field(default=0, ge=0)
    """Instances that others start for the run on other nodes (docs/operations.md), counted beside its own."""


class Model(Table):
    """The base model."""

    path: str = "quickstart"
    """A Hugging Face folder, or "quickstart": the tiny Qwen3 that Metronome warms up
    itself (cached under `run.output`)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the rollout instances; bfloat16 needs rollout.engine = "vllm". On CPU fp32:
    bf16 moves log-probabilities by 0.15."""


class Data(Table):
    """Problem sets in DeepScaleR's schema (problem, answer, solution): .json, .jsonl, .parquet or a folder of them,
    here or on s3://, or a dataset of the Hugging Face hub (owner/name or owner/name:split)."""

    train: str = "data/addition_train.jsonl"
    """Problems to train on. Relative paths are tried from the current folder, then from Metronome's own."""
    heldout: str = "data/addition_heldout.jsonl"
    """Problems never trained on; what `evaluate.benchmark = ""` evaluates. Empty: `heldout_fraction` of `train`."""
    heldout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of `train` to hold out, chosen by each problem's own text, so that it stays when rows come or go.
    For use without a held-out file."""
    decontaminate: list[str] = Field(default_factory=lambda: ["benchmark"])
    """Training problems that also stand in one of these sets are left out; "benchmark": those held out and evaluated;
    []: off."""
    prompt_template: str = "{problem}"
    """Text with `{problem}` in it, or "chat": the tokenizer's chat template around one user message."""

    @model_validator(mode="before")
    @classmethod
    def _no_default_heldout(cls, given: Any) -> Any:  # noqa: ANN401
        """Whoever gives a fraction and no file means no file."""
        if isinstance(given, dict) and given.get("heldout_fraction") and "heldout" not in given:
            return {**given, "heldout": ""}
        return given

    @model_validator(mode="after")
    def _heldout(self) -> Data:
        if bool(self.heldout) == bool(self.heldout_fraction):
            raise ValueError(
                "give either data.heldout (a problem set) or, with data.heldout empty, data.heldout_fraction (a "
                "share of data.train above 0)"
            )
        return self

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
    """Seconds one call may take before its worker is killed and the response scores 0.
    math-verify needs milliseconds."""
    on_error: Literal["stop", "zero"] = "stop"
    """A reward that raises or returns the wrong number: stop the run after a checkpoint, or score 0 and count it."""
    workers: PositiveInt = 1
    """Verifier processes. One keeps up with a small model; raise it when verifying is slow."""
