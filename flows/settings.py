"""Parameters of the flows, which the Prefect UI shows in the form of a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from engine.config import Config
from engine.config.recipe import load_config
from tasks.cluster.deployment_form import shown_values

Recipe = str
Overrides = Sequence[str]
PoolInstances = NonNegativeInt
# The flows' docstrings explain these, because Prefect shows them in the form.


def _key(name: str) -> Any:  # noqa: ANN401
    """An optional field for a key of the configuration, with the description of that key."""
    table, _, key = name.partition(".")
    described = Config.model_fields[table].annotation.model_fields[key].description  # type: ignore[union-attr]
    return Field(default=None, title=name, description=f"{described} If left out: as in the recipe.")


class Settings(BaseModel):
    """The keys that differ from run to run; the recipe has the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = _key("run.name")
    output: str | None = _key("run.output")
    model: str | None = _key("model.path")
    train_data: str | None = _key("data.train")
    mode: Literal["sync", "periodic", "one_step_off", "bounded"] | None = _key("train.mode")
    steps: PositiveInt | None = _key("train.steps")
    prompts_per_step: PositiveInt | None = _key("train.prompts_per_step")
    group_size: PositiveInt | None = _key("rollout.group_size")
    learning_rate: PositiveFloat | None = _key("train.learning_rate")
    checkpoint_every: NonNegativeInt | None = _key("checkpoint.every")
    checkpoint_path: str | None = _key("checkpoint.path")
    benchmark: str | None = _key("evaluate.benchmark")
    experiment: str | None = _key("tracking.experiment")

    def overrides(self) -> list[str]:
        """KEY=VALUE for each key that was filled in, in the form of `--set`. A value that the deployment filled in and
        nobody changed is left out, because the recipe has it."""
        shown = shown_values()
        return [
            f"{type(self).model_fields[name].title}={value}"
            for name, value in self
            if value is not None and value != shown.get(name)
        ]


AS_RECIPE = Settings()
"""Settings with no key filled in."""


def configured(recipe: str, settings: Settings, overrides: Sequence[str]) -> Config:
    """The configuration of a run; `overrides` take precedence over `settings`. Raises BadInput."""
    return load_config(recipe, [*settings.overrides(), *overrides])
