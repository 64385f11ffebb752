"""What a run ends in: evaluation and tracking."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from engine.config.base import Table


class Evaluate(Table):
    """Evaluation of a model on a benchmark."""

    benchmark: str = ""
    """A problem file; empty takes data.heldout."""
    problems: int = Field(default=256, ge=0)
    """At most so many problems, the first of the file; 0 takes all."""
    samples: PositiveInt = 1
    """Responses per problem (k of avg@k and pass@k)."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Of sampling; 0 takes the most likely token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Of sampling."""
    top_k: int = Field(default=0, ge=0)
    """Of sampling; 0 switches it off."""
    max_new_tokens: PositiveInt = 512
    """Length limit of a response."""


class Tracking(Table):
    """MLflow."""

    uri: str = ""
    """MLflow tracking URI; empty: sqlite in `run.output`, no server needed."""
    experiment: str = "metronome"
    """MLflow experiment."""
