"""Shows the recipe's values in the form of a deployment, as the defaults of its fields."""

from __future__ import annotations

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


def shown_values() -> dict[str, Any]:
    """The values that the form of this flow run's deployment has filled in, by field; empty outside of a deployment.

    A field with such a value was left unchanged. The recipe then decides, because it may have been edited since, or
    another recipe may be named.
    """
    if not deployment.id:
        return {}
    with get_client(sync_client=True) as client:
        schema: Any = client.read_deployment(deployment.id).parameter_openapi_schema
    whole = schema if isinstance(schema, dict) else schema.model_dump(mode="json")
    if FIELDS not in whole["properties"]:
        return {}
    return {name: field["default"] for name, field in _fields(whole).items() if field.get("default") is not None}


def _fields(schema: JsonObject) -> dict[str, Any]:
    fields: dict[str, Any] = schema["definitions"]["Settings"]["properties"]
    return fields
