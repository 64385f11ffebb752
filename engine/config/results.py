"""The tables of what comes out of a run: evaluation and tracking."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, WithJsonSchema, field_validator

from engine.config.marks import only_with
from engine.config.table import Table

NAMES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
"""What a key takes whose list is joined with commas."""


class Evaluate(Table):
    """How a model is evaluated on benchmarks."""

    benchmark: Annotated[str, WithJsonSchema(NAMES)] = ""
    """Benchmarks: names (aime24, aime25, amc, amc24, math500, minerva, olympiadbench) or problem files, several as a
    list or separated by commas. The first decides on the champion. Empty: the problems of data.heldout."""
    folder: str = ""
    """Folder with the benchmarks that are given by name. Empty: the folders of data.train and data.heldout. A benchmark
    that is not there is read from the Hugging Face hub."""
    problems: int = Field(default=256, ge=0)
    """Largest number of problems of each benchmark, the first ones of its file. 0: all."""
    samples: PositiveInt = 1
    """Responses sampled for each problem (k of avg@k, pass@k and maj@k). Periodic Asynchrony takes 8 for AIME24."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Temperature of sampling. 0: always the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the most likely tokens that are sampled from. 1: all of them."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are sampled from. 0: all of them."""
    max_new_tokens: PositiveInt = 512
    """Largest number of tokens of a response."""
    max_context: int = Field(default=0, ge=0)
    """Largest number of tokens of prompt and response together, for instances that are started for an evaluation.
    0: rollout.max_context. The instances of a running training keep rollout.max_context."""
    every: int = Field(default=0, ge=0)
    """Steps between two evaluations in a running training, beginning with step 0; the last step has none. They run on
    the run's own instances (docs/evaluation.md). 0: never."""
    max_wait_s: Annotated[float, only_with("evaluate.every")] = Field(default=300.0, ge=0)
    """Longest time in seconds that training waits for an evaluation of `every`. One that takes longer is dropped and
    reported. 0: training does not wait."""

    @field_validator("benchmark", mode="before")
    @classmethod
    def _join_list(cls, value: Any) -> Any:  # noqa: ANN401
        return ",".join(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value

    @property
    def benchmarks(self) -> list[str]:
        """The names and files of `benchmark`, in order."""
        return [name.strip() for name in self.benchmark.split(",") if name.strip()]


Also = Literal["wandb", "trackio", "tensorboard"]


class Tracking(Table):
    """Where MLflow keeps the run's parameters and metrics, and who else gets the figures."""

    uri: str = ""
    """Tracking URI of MLflow, without a password: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD give that.
    Empty: the environment's MLFLOW_TRACKING_URI, or without one an sqlite file in `run.output`, which needs no
    server."""
    experiment: str = Field(default="metronome", min_length=1, max_length=500)
    """Name of the MLflow experiment, and of the project in wandb and trackio."""
    also: tuple[Also, ...] = ()
    """Further trackers that get the figures of each step and evaluation, by their own packages, which are extras of
    Metronome: "wandb", "trackio", "tensorboard" (into tensorboard/ of the run folder)."""
