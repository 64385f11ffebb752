"""The work pools: base job templates of infra/pools, with the defaults of pools.toml and a file of the user's own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefect.utilities.schema_tools.validation import validate
from pydantic import TypeAdapter, ValidationError

from engine.config.recipe import HOME
from engine.config.table import Table
from engine.errors import BadInput
from engine.types import JsonObject

POOLS = HOME / "infra/pools"
"""Templates, and the list of pools."""
TEMPLATES = ("process", "kubernetes")
"""The templates. Each has the name of the type of its pools in Prefect."""


class WorkPool(Table):
    """An entry of a list of pools: how a pool differs from another one, or from a template."""

    like: str = ""
    """The pool or the template that it differs from; empty: the pool of the same name in the list of infra/pools."""
    variables: dict[str, Any] = {}
    """New defaults of the template's variables. `env` is added to the old one, any other value takes its place."""
    host_mounts: dict[str, Literal["Directory", "File"]] | None = None
    """Paths of the node that a pod sees, read-only, and what they must be. None: as before."""

    def over(self, other: WorkPool) -> WorkPool:
        """The changes of `other`, then these."""
        variables = other.variables | self.variables
        if env := other.variables.get("env", {}) | self.variables.get("env", {}):
            variables["env"] = env
        mounts = other.host_mounts if self.host_mounts is None else self.host_mounts
        return WorkPool(like=self.like or other.like, variables=variables, host_mounts=mounts)


def read_pools(own: Path | None = None) -> dict[str, WorkPool]:
    """The pools by name: those that ship, changed and added to by a file of the user's own. Raises BadInput."""
    pools = _read(POOLS / "pools.toml")
    for name, pool in (_read(own) if own is not None else {}).items():
        pools[name] = pool.over(pools[name]) if name in pools else pool
    return pools


def template(name: str, pools: Mapping[str, WorkPool] | None = None) -> tuple[str, JsonObject]:
    """(type, base job template) of a work pool. Raises BadInput for an unknown one, and for values that do not fit."""
    pools = read_pools() if pools is None else pools
    if name not in pools:
        raise BadInput(f"no work pool {name}: expected one of {', '.join(sorted(pools))}")
    pool = pools[name]
    seen = [name]
    while pool.like not in TEMPLATES:
        if pool.like not in pools or pool.like in seen:
            known = ", ".join([*TEMPLATES, *sorted(set(pools) - set(seen))])
            raise BadInput(f"work pool {name}: like = {pool.like!r}: expected one of {known}")
        seen.append(pool.like)
        below = pools[pool.like]
        pool = pool.over(below).model_copy(update={"like": below.like})
    base: JsonObject = json.loads((POOLS / f"{pool.like}.json").read_text())
    _set_defaults(name, base["variables"], pool.variables)
    if pool.host_mounts:
        if pool.like != "kubernetes":
            raise BadInput(f"work pool {name}: host_mounts: only pods on Kubernetes have mounts")
        _mount(base["job_configuration"]["job_manifest"]["spec"]["template"]["spec"], pool.host_mounts)
    return pool.like, base


def _read(file: Path) -> dict[str, WorkPool]:
    try:
        return TypeAdapter(dict[str, WorkPool]).validate_python(tomllib.loads(file.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"list of work pools {file}: {error}") from None
    except ValidationError as error:
        [first, *_] = error.errors()
        raise BadInput(f"list of work pools {file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _set_defaults(name: str, schema: JsonObject, values: Mapping[str, Any]) -> None:
    fields = schema["properties"]
    if unknown := sorted(set(values) - set(fields)):
        raise BadInput(f"work pool {name}: no variable {unknown[0]}: expected one of {', '.join(fields)}")
    for key, value in values.items():
        fields[key]["default"] = fields[key]["default"] | value if key == "env" else value
    defaults = {key: field["default"] for key, field in fields.items() if "default" in field}
    for error in validate(defaults, schema):
        raise BadInput(f"work pool {name}: variable {error.json_path.removeprefix('$.')}: {error.message}")


def _mount(pod: JsonObject, mounts: Mapping[str, str]) -> None:
    """Let a pod see paths of its node, read-only."""
    [container] = pod["containers"]
    for number, (path, kind) in enumerate(mounts.items()):
        pod["volumes"].append({"name": f"host-{number}", "hostPath": {"path": path, "type": kind}})
        container["volumeMounts"].append({"name": f"host-{number}", "mountPath": path, "readOnly": True})
