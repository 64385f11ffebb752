"""Creates work pools, the limit on NPUs, deployments with schedules, and automations on the Prefect server.

A repeated deploy updates all of them; nothing is created twice. Work pools have the base job templates of infra/pools,
with the defaults of pools.toml and of the user's own file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import httpx
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import get_current_settings
from prefect.utilities.schema_tools.validation import validate
from pydantic import TypeAdapter, ValidationError

from engine.config.recipe import HOME, load_config
from engine.config.table import Table
from engine.errors import BadInput, MetronomeError
from engine.types import JsonObject
from tasks.cluster import alerts, watchdog
from tasks.cluster.deployment_form import show_recipe
from tasks.cluster.devices import LIMIT

POOLS = HOME / "infra/pools"
"""Folder of the templates and the list of pools."""
TEMPLATES = ("process", "kubernetes")
"""The templates. Each is named after the type of its pools in Prefect."""


class WorkPool(Table):
    """An entry of a list of pools: its differences from another pool or from a template."""

    like: str = ""
    """The pool or template from which it differs; empty: the pool of the same name in the list of infra/pools."""
    variables: dict[str, Any] = {}
    """New defaults of the template's variables. `env` is added to the old one; any other value replaces it."""
    host_mounts: dict[str, Literal["Directory", "File"]] | None = None
    """Paths of the node that a pod can read, and what they must be. None: unchanged."""

    def over(self, other: WorkPool) -> WorkPool:
        """The changes of `other`, followed by these."""
        variables = other.variables | self.variables
        if env := other.variables.get("env", {}) | self.variables.get("env", {}):
            variables["env"] = env
        mounts = other.host_mounts if self.host_mounts is None else self.host_mounts
        return WorkPool(like=self.like or other.like, variables=variables, host_mounts=mounts)


def read_pools(own: Path | None = None) -> dict[str, WorkPool]:
    """The pools by name: those that ship, extended and changed by the user's own file. Raises BadInput."""
    pools = _read(POOLS / "pools.toml")
    for name, pool in (_read(own) if own is not None else {}).items():
        pools[name] = pool.over(pools[name]) if name in pools else pool
    return pools


def read_template(name: str, pools: Mapping[str, WorkPool] | None = None) -> tuple[str, JsonObject]:
    """(type, base job template) of a work pool. Raises BadInput for an unknown pool, and for values that do not fit."""
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
    """Give a pod read-only access to paths of its node."""
    [container] = pod["containers"]
    for number, (path, kind) in enumerate(mounts.items()):
        pod["volumes"].append({"name": f"host-{number}", "hostPath": {"path": path, "type": kind}})
        container["volumeMounts"].append({"name": f"host-{number}", "mountPath": path, "readOnly": True})


FILE = HOME / "infra/prefect.yaml"
"""The file with the deployments."""
TRAINING = ("pipeline", "nightly", "train", "evaluate", "nightly-evaluation", "join-training")
"""Deployments on the training pool. Their runs start rollout instances, and trainer ranks unless they only evaluate."""
WITH_ROLLOUTS = ("pipeline", "nightly", "train", "evaluate", "nightly-evaluation")
"""Deployments of the training pool that can take instances from the rollout pool."""
ROLLOUTS = "serve-rollouts"
DEPLOY_S = 300.0
"""Time limit of `prefect deploy` in seconds; it takes 2 s on an idle machine."""


NIGHTLY_TRAINING = "0 22 * * *"
NIGHTLY_EVALUATION = "0 6 * * *"
"""Cron lines of --schedule."""


@dataclass(frozen=True)
class Choices:
    """The options of a deploy, in addition to the recipe."""

    pool: str = "cpu"
    """Work pool of all training and evaluation."""
    rollout_pool: str = "cpu"
    """Work pool of rollout instances that join a run."""
    timezone: str = "Etc/UTC"
    """Time zone of the schedules (IANA name)."""
    training: str = ""
    """Cron line of the nightly training; empty: no schedule."""
    evaluation: str = ""
    """Cron line of the nightly evaluation; empty: no schedule."""
    npus: int = 0
    """Slots of the limit ascend-npus; 0 leaves the limit as it is."""
    on_rollout_pool: int = 0
    """Default number of instances that a training or an evaluation takes from the rollout pool, including scheduled
    ones."""
    pools: Path | None = None
    """A list of work pools in addition to that of infra/pools."""
    notify: str = ""
    """Address of a webhook for messages about runs; empty: alerts stay as they are; "off": there are none."""
    notify_format: str = ""
    """Format of the messages; empty: that of the address's host."""
    notify_wait: float = alerts.WAIT_MINUTES
    """Minutes that a run may wait for a worker without a message."""


def deploy_flows(recipe: str, overrides: Sequence[str], choices: Choices) -> dict[str, str]:
    """Update the server that PREFECT_API_URL names; returns rows for the console. Raises BadInput, MetronomeError."""
    tree = read_deployments(recipe, overrides, choices)
    pools = sorted({one["work_pool"]["name"] for one in tree["deployments"]})
    known = read_pools(choices.pools)
    templates = {name: read_template(name, known) for name in pools}
    server = _server()
    _make_pools(templates)
    if choices.npus:
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name(LIMIT, choices.npus)
    _deploy(tree)
    show_recipe({one["name"]: one["entrypoint"] for one in tree["deployments"]}, load_config(recipe, list(overrides)))
    watched = watchdog.install_automations()
    if choices.notify:
        watched += alerts.install_alerts(choices.notify, _notify_format(choices), choices.notify_wait)
    return {
        "Prefect server": server,
        "work pools": ", ".join(pools),
        **{one["name"]: _row(one) for one in tree["deployments"]},
        "automations": ", ".join([*_triggers(tree), *watched]),
        "start a worker": " and ".join(_worker(name, templates[name][0]) for name in pools),
    }


def read_deployments(recipe: str, overrides: Sequence[str], choices: Choices) -> JsonObject:
    """The content of infra/prefect.yaml, with recipe, pools and schedules filled in."""
    _check(choices)
    tree: JsonObject = yaml.safe_load(FILE.read_text())
    crons = {"nightly": choices.training, "nightly-evaluation": choices.evaluation}
    for one in tree["deployments"]:
        name = one["name"]
        if "recipe" in one.get("parameters", ()):
            one["parameters"] |= {"recipe": recipe, **({"overrides": list(overrides)} if overrides else {})}
        if name in WITH_ROLLOUTS and choices.on_rollout_pool:
            one["parameters"]["on_rollout_pool"] = choices.on_rollout_pool
        if name in TRAINING:
            one["work_pool"]["name"] = choices.pool
        if name == ROLLOUTS:
            one["work_pool"]["name"] = choices.rollout_pool
        if name in crons:
            [schedule] = one["schedules"]
            one["schedules"] = (
                [schedule | {"cron": crons[name], "timezone": choices.timezone, "active": True}] if crons[name] else []
            )
    return tree


def _check(choices: Choices) -> None:
    try:
        ZoneInfo(choices.timezone)
    except (ZoneInfoNotFoundError, ValueError):
        raise BadInput(
            f"--timezone {choices.timezone}: no such time zone; expected a name such as Asia/Shanghai"
        ) from None
    _notify_format(choices)
    for option, count in (("--npus", choices.npus), ("--on-rollout-pool", choices.on_rollout_pool)):
        if count < 0:
            raise BadInput(f"{option} {count}: expected 0 or more")


def _notify_format(choices: Choices) -> str:
    told = choices.notify not in ("", alerts.OFF)
    return alerts.choose_format(choices.notify, choices.notify_format) if told else ""


def _server() -> str:
    """URL of the server. Raises BadInput if none is named, or if it does not answer."""
    url = get_current_settings().api.url
    if not url:
        raise BadInput(
            "no Prefect server: set PREFECT_API_URL, for example to http://127.0.0.1:4200/api; `make services` starts "
            "one there"
        )
    with get_client(sync_client=True) as client:
        if error := client.api_healthcheck():
            raise BadInput(f"the Prefect server at {url} (PREFECT_API_URL) does not answer: {error}")
    return str(url)


def _make_pools(templates: Mapping[str, tuple[str, JsonObject]]) -> None:
    with get_client(sync_client=True) as client:
        for name, (kind, base) in templates.items():
            try:
                client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=base), overwrite=True)
            except httpx.HTTPStatusError as error:
                raise MetronomeError(
                    f"work pool {name}: the Prefect server refuses it: {error.response.text[:500]}"
                ) from None


def _deploy(tree: Mapping[str, Any]) -> None:
    """Deploy with Prefect's own command, which updates schedules and triggers correctly."""
    with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
        file = Path(scratch) / "prefect.yaml"
        file.write_text(yaml.safe_dump(tree, sort_keys=False))
        command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEPLOY_S)
        except subprocess.TimeoutExpired:
            raise MetronomeError(f"prefect deploy did not finish within {DEPLOY_S:.0f} s") from None
    if done.returncode:
        raise MetronomeError(f"prefect deploy exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _row(one: Mapping[str, Any]) -> str:
    when = [f", {each['cron']} {each['timezone']}" for each in one.get("schedules", ())]
    if "schedules" in one and not when:
        when = [", no schedule (--schedule adds one)"]
    return f"{one['entrypoint'].rpartition('.')[2]} on {one['work_pool']['name']}{''.join(when)}"


def _worker(pool: str, kind: str) -> str:
    return f"{'metronome worker' if kind == watchdog.PROCESS else 'prefect worker start'} --pool {pool}"


def _triggers(tree: Mapping[str, Any]) -> list[str]:
    return [trigger["name"] for one in tree["deployments"] for trigger in one.get("triggers", ())]
