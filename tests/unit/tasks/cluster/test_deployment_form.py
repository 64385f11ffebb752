"""The form of a deployment, against Prefect's schema of a real flow; tests/stack has the server."""

import pytest
from prefect.utilities.callables import parameter_schema

from engine.config.keys import flatten_keys
from engine.config.recipe import load_config
from flows import settings as flow_settings
from flows.pipeline import pipeline
from flows.settings import Settings
from flows.stages import join_training
from tasks.cluster.deployment_form import with_defaults

VALUES = flatten_keys(load_config("infra/recipes/quickstart.toml", ["train.steps=7"]).model_dump(mode="json"))


def fields(schema):
    return schema["definitions"]["Settings"]["properties"]


def test_the_form_shows_the_recipes_values():
    schema = with_defaults(parameter_schema(pipeline), VALUES)
    shown = {name: field["default"] for name, field in fields(schema).items()}
    assert (shown["steps"], shown["prompts_per_step"], shown["mode"]) == (7, 32, "periodic")
    assert shown["learning_rate"] == pytest.approx(3e-4)
    assert shown["model"] == "data/quickstart_model"
    assert shown["name"] is None
    assert schema["properties"]["settings"]["default"] == shown
    assert with_defaults(parameter_schema(join_training), VALUES) is None


def test_what_the_form_has_filled_in_is_as_in_the_recipe(monkeypatch):
    """So a recipe that was edited since, another recipe, and a resumed run are not overridden by the form."""
    sent = Settings(name="try", steps=7, group_size=4, mode="periodic")
    assert sent.overrides() == ["run.name=try", "train.mode=periodic", "train.steps=7", "rollout.group_size=4"]
    monkeypatch.setattr(flow_settings, "shown_values", lambda: {"steps": 7, "group_size": 8, "mode": "periodic"})
    assert sent.overrides() == ["run.name=try", "rollout.group_size=4"]
