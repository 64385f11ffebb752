"""Parameters of the flows, which the Prefect UI shows in the form of a deployment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from prefect.client.orchestration import get_client
from prefect.runtime import deployment, flow_run
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from engine.config import Config
from engine.config.recipe import load_config, override_keys, recipe_keys
from engine.errors import BadInput
from tasks.cluster.flow_run import name_flow_run
from tasks.terminal import console

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

    @property
    def given(self) -> list[str]:
        """KEY=VALUE for each key that is filled in, in the form of `--set`."""
        return [f"{type(self).model_fields[name].title}={value}" for name, value in self if value is not None]


AS_RECIPE = Settings()
"""Settings with no key filled in."""


@dataclass(frozen=True)
class Given:
    """The keys of a run that are not the recipe's, KEY=VALUE each."""

    deploy: list[str]
    """The overrides of `metronome deploy`."""
    run: list[str]
    """Settings and overrides of this flow run. They count before the deploy's."""

    @property
    def all(self) -> list[str]:
        """Both; the last of a key counts."""
        return [*self.deploy, *self.run]


def given_keys(settings: Settings, overrides: Sequence[str]) -> Given:
    """What was given in addition to the recipe. Outside of a deployment all of it is the run's. A row of the deploy's
    overrides that is missing in the flow run's counts no more.

    Raises BadInput if settings and overrides of the run contradict each other.
    """
    own = _deployed_overrides()
    more = [one for one in overrides if one not in own]
    fields = override_keys(settings.given)
    for key, value in override_keys(more).items():
        if fields.get(key, value) != value:
            raise BadInput(f"{key} is {fields[key]!r} in settings and {value!r} in overrides: leave one of them out")
    return Given([one for one in overrides if one in own], [*settings.given, *more])


def _deployed_overrides() -> list[str]:
    """The overrides of this flow run's deployment; none outside of one."""
    if not deployment.id:
        return []
    with get_client(sync_client=True) as client:
        return list(client.read_deployment(deployment.id).parameters.get("overrides", ()))


def check_start(given: Given, start: str) -> None:
    """Raise BadInput if a run that starts from a registered policy (`start`) was given a model as well."""
    if start != "base" and "model.path" in override_keys(given.run):
        raise BadInput(
            f"continue_from = {start} starts from a registered policy, and model.path names another model: leave "
            "model.path out, or choose continue_from = base"
        )


def run_name(settings: Settings, overrides: Sequence[str]) -> str:
    """The run.name that was given, else the deployment with the time of the night; "" outside of a deployment."""
    named = override_keys(one for one in overrides if one.partition("=")[0].strip() == "run.name").get("run.name")
    if name := settings.name or named:
        return str(name)
    start = flow_run.scheduled_start_time
    return f"{deployment.name}-{start.astimezone():%Y%m%d-%H%M%S}" if deployment.id else ""


def named_run(given: Given, recipe: str, settings: Settings) -> Given:
    """With the run.name of a night, or of a named deploy, if neither recipe nor person gives one."""
    own = str(deployment.name or "").startswith("nightly") or bool(os.environ.get(console.DEPLOY))
    if not deployment.id or not own or "run.name" in {**recipe_keys(recipe), **override_keys(given.all)}:
        return given
    return replace(given, run=[f"run.name={run_name(settings, given.all)}", *given.run])


def in_form_words(text: str) -> str:
    """A message for the command line, in the words of the form of a deployment."""
    text = re.sub(r"give another --set run\.name=NAME", "give another run.name in settings", text)
    text = re.sub(r"by --set run\.name=NAME", "by run.name in settings", text)
    text = re.sub(r"^--set: ", "settings and overrides: ", text)
    text = re.sub(r"--set (?=\S+=)", "the override ", text)
    text = text.replace("with --set", "in overrides").replace("--set", "an override")
    return text.replace("--resume", "resume")


@contextmanager
def form_errors(settings: Settings, overrides: Sequence[str]) -> Iterator[None]:
    """In a deployment's flow run, a refusal speaks of the form, and the flow run gets the name of its run."""
    try:
        yield
    except BadInput as error:
        if not deployment.id:
            raise
        name_flow_run(f"{run_name(settings, overrides)}{console.REFUSED}")
        raise BadInput(in_form_words(str(error))) from None


def configured(recipe: str, settings: Settings, overrides: Sequence[str]) -> Config:
    """The configuration of a flow run; see `given_keys`. Raises BadInput."""
    with form_errors(settings, overrides):
        given = named_run(given_keys(settings, overrides), recipe, settings)
        return load_config(recipe, given.all)
