"""What a run ends in: evaluation and tracking."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveInt, field_validator

from engine.config.table import Table


class Evaluate(Table):
    """Evaluation of a model on benchmarks."""

    benchmark: str = ""
    """Names (aime24, aime25, amc, math500, minerva, olympiadbench) or problem files, several separated by commas (or a
    list); the first decides on the champion. Empty: data.heldout."""
    folder: str = ""
    """Where benchmarks given by name lie. Empty: beside data.train and data.heldout;
    what is not there comes from the hub."""
    problems: int = Field(default=256, ge=0)
    """At most so many problems of each benchmark, the first of the file; 0 takes all."""
    samples: PositiveInt = 1
    """Responses per problem (k of avg@k, pass@k and maj@k); Periodic Asynchrony takes 8 for AIME24."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Of sampling; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of sampling."""
    top_k: int = Field(default=0, ge=0)
    """Of sampling; 0 switches it off."""
    max_new_tokens: PositiveInt = 512
    """Length limit of a response."""
    max_context: int = Field(default=0, ge=0)
    """Prompt and response tokens together, of instances started for an evaluation; 0 takes rollout.max_context.
    Instances of a running training keep theirs."""
    every: int = Field(default=0, ge=0)
    """In modes "sync" and "periodic": evaluate in every so many steps, on instances that wait for the trainer;
    0: never."""
    max_wait_s: float = Field(default=300.0, ge=0)
    """Seconds that training may wait for an evaluation in a step; one that takes longer is dropped and reported;
    0: none."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Of paired comparisons: `champion` moves when p is at most 1 - confidence."""

    @field_validator("benchmark", mode="before")
    @classmethod
    def _joined(cls, value: Any) -> Any:  # noqa: ANN401
        return ",".join(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else value

    @property
    def benchmarks(self) -> list[str]:
        """The names and files of `benchmark`, in order."""
        return [name.strip() for name in self.benchmark.split(",") if name.strip()]


class Tracking(Table):
    """MLflow."""

    uri: str = ""
    """MLflow tracking URI; empty: the environment's MLFLOW_TRACKING_URI,
    else sqlite in `run.output`, no server needed."""
    experiment: str = "metronome"
    """MLflow experiment."""
