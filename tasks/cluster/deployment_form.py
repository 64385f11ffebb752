"""Shows the recipe's values in the form of a deployment, as the defaults of its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.runtime import deployment

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.types import JsonObject

FIELDS = "settings"
"""The parameter of the flows whose fields are keys of the recipe; the title of a field is its key."""
OWN = ("run.name",)
"""Keys that are specific to one run and have no default in the form."""


def show_recipe(entrypoints: Mapping[str, str], config: Config) -> None:
    """Give the fields of some deployments the values of a recipe as defaults. `entrypoints`: deployment name →
    entrypoint."""
    values = flatten_keys(config.model_dump(mode="json"))
    wanted = DeploymentFilter(name=DeploymentFilterName(any_=list(entrypoints)))
    with get_client(sync_client=True) as client:
        for found in client.read_deployments(deployment_filter=wanted):
            schema = with_defaults(found.parameter_openapi_schema, values)
            if schema is not None and found.entrypoint == entrypoints[found.name]:
                client.update_deployment(found.id, DeploymentUpdate(parameter_openapi_schema=schema))


def with_defaults(schema: Any, values: Mapping[str, Any]) -> JsonObject | None:  # noqa: ANN401
    """A deployment's schema of parameters with `values` (by key) as defaults; None if it has no such fields."""
    whole: JsonObject = schema if isinstance(schema, dict) else schema.model_dump(mode="json")
    if FIELDS not in whole["properties"]:
        return None
    fields = _fields(whole)
    for field in fields.values():
        if field["title"] not in OWN:
            value = values[field["title"]]
            field["default"] = None if isinstance(value, list) else value  # a field of the form is one text or number
    whole["properties"][FIELDS]["default"] = {name: field.get("default") for name, field in fields.items()}
    return whole


def read_form() -> tuple[dict[str, Any], list[str]]:
    """What the form of this flow run's deployment has filled in: the values by field, and the deploy's overrides,
    KEY=VALUE each. Both are empty outside of a deployment."""
    if not deployment.id:
        return {}, []
    with get_client(sync_client=True) as client:
        found = client.read_deployment(deployment.id)
    schema: Any = found.parameter_openapi_schema
    whole = schema if isinstance(schema, dict) else schema.model_dump(mode="json")
    overrides = list(found.parameters.get("overrides", ()))
    if FIELDS not in whole["properties"]:
        return {}, overrides
    shown = {name: field["default"] for name, field in _fields(whole).items() if field.get("default") is not None}
    return shown, overrides


def in_form_words(text: str) -> str:
    """A message for the command line, in the words of the form of a deployment."""
    text = re.sub(r"give another --set run\.name=NAME", "give another run.name in settings", text)
    text = re.sub(r"by --set run\.name=NAME", "by run.name in settings", text)
    text = re.sub(r"^--set: ", "settings and overrides: ", text)
    text = re.sub(r"--set (?=\S+=)", "the override ", text)
    text = text.replace("with --set", "in overrides").replace("--set", "an override")
    return text.replace("--resume", "resume")


def _fields(schema: JsonObject) -> dict[str, Any]:
    fields: dict[str, Any] = schema["definitions"]["Settings"]["properties"]
    return fields
