"""Creates work pools, limits on devices, deployments with schedules, and alerts on the Prefect server.

A repeated deploy updates all of them; nothing is created twice. Everything that a person can get wrong is checked
before the server is changed. Work pools have the base job templates of infra/pools,
with the defaults of pools.toml and of the user's own file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings
from prefect.utilities.schema_tools.validation import validate
from pydantic import TypeAdapter, ValidationError

from engine.config import Config
from engine.config.recipe import HOME, load_config
from engine.config.table import Table
from engine.errors import BadInput, MetronomeError, counted, without_password
from engine.types import JsonObject
from tasks.cluster import alerts, watchdog
from tasks.cluster.devices import CPU_SLOTS, CUDA_DEVICES, NPUS, OPTIONS, UNCOUNTED, count_devices, visible_cuda_devices
from tasks.cluster.prefect_api import CLIENT_AUTH
from tasks.terminal.console import DEPLOY, named_deployment, own_program

POOLS = HOME / "infra/pools"
"""Folder of the templates and the list of pools."""
PROCESS = "process"
"""Type of the work pools whose workers start runs as processes on their own node."""
TEMPLATES = (PROCESS, "kubernetes")
"""The templates. Each is named after the type of its pools in Prefect."""


class WorkPool(Table):
    """An entry of a list of pools: its differences from another pool or from a template."""

    like: str = ""
    """The pool or template from which it differs; empty: the pool of the same name in the list of infra/pools."""
    variables: dict[str, Any] = {}
    """New defaults of the template's variables. `env` is added to the old one; any other value replaces it."""
    host_mounts: dict[str, Literal["Directory", "File"]] | None = None
    """Paths of the node that a pod can read, and what they must be. None: unchanged."""


def read_pools(own: Path | None = None) -> dict[str, list[WorkPool]]:
    """The entries of each pool by its name: those of the user's own file before those that ship. Raises BadInput."""
    pools = {name: [pool] for name, pool in _read(POOLS / "pools.toml").items()}
    for name, pool in (_read(own) if own is not None else {}).items():
        pools[name] = [pool, *pools.get(name, ())]
    return pools


def read_template(name: str, pools: Mapping[str, Sequence[WorkPool]] | None = None) -> tuple[str, JsonObject]:
    """(type, base job template) of a work pool. Raises BadInput for an unknown pool, and for values that do not fit."""
    pools = read_pools() if pools is None else pools
    if name not in pools:
        raise BadInput(f"no work pool {name}: expected one of {', '.join(sorted(pools))}")
    pool, *rest = pools[name]
    others = {key: one for key, one in pools.items() if key != name} | ({name: rest} if rest else {})
    like = pool.like or (name if rest else "")
    if like in TEMPLATES:
        kind: str = like
        base: JsonObject = json.loads((POOLS / f"{like}.json").read_text())
    elif like in others:
        kind, base = read_template(like, others)
    else:
        raise BadInput(
            f"work pool {name}: like = {pool.like!r}: expected one of {', '.join([*TEMPLATES, *sorted(others)])}"
        )
    _set_defaults(name, base["variables"], pool.variables)
    if pool.host_mounts is not None:
        if kind != "kubernetes":
            raise BadInput(f"work pool {name}: host_mounts: only pods on Kubernetes have mounts")
        _mount(base["job_configuration"]["job_manifest"]["spec"]["template"]["spec"], pool.host_mounts)
    return kind, base


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
    """Give a pod read-only access to paths of its node, in place of those of the pool that it is like."""
    [container] = pod["containers"]
    names = {f"host-{number}": path for number, path in enumerate(mounts)}
    for each in (pod["volumes"], container["volumeMounts"]):
        each[:] = [one for one in each if not one["name"].startswith("host-")]
    pod["volumes"] += [{"name": name, "hostPath": {"path": path, "type": mounts[path]}} for name, path in names.items()]
    container["volumeMounts"] += [{"name": name, "mountPath": path, "readOnly": True} for name, path in names.items()]


FILE = HOME / "infra/prefect.yaml"
"""The file with the deployments."""
TRAINING = ("pipeline", "nightly", "train", "evaluate", "join-training")
"""Deployments on the training pool. Their runs start rollout instances, and trainer ranks unless they only evaluate."""
WITH_ROLLOUTS = ("pipeline", "nightly", "train", "evaluate")
"""Deployments of the training pool that can take instances from the rollout pool."""
ROLLOUTS = "serve-rollouts"
DEPLOY_S = 900.0
"""Time limit of `prefect deploy` in seconds; it takes 2 s on an idle machine."""


NIGHTLY = "nightly"
"""The deployment with a schedule."""
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}"
"""Values of --name."""
ADDRESSES = ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL")
"""Variables that flow runs get from the shell that deploys."""
NIGHTLY_TRAINING = "0 22 * * *"
"""The cron line of --schedule."""
LIMITS = 200
"""Number of limits that Prefect gives in one reply."""
UTC = "Etc/UTC"
"""Time zone of a new schedule."""


@dataclass(frozen=True)
class Choices:
    """The options of a deploy, in addition to the recipe."""

    name: str = ""
    """Beginning of the names of these deployments, for several recipes or teams on one server."""
    pool: str = "cpu"
    """Work pool of all training and evaluation."""
    rollout_pool: str = "cpu"
    """Work pool of rollout instances that join a run."""
    timezone: str = ""
    """Time zone of the schedule (IANA name); empty: the one that it has on the server, else `UTC`."""
    training: str = ""
    """Cron line of the nightly training; empty: the schedule on the server stays, if there is one."""
    npus: int = 0
    """Slots of the limit ascend-npus; 0 leaves the limit as it is."""
    cuda_devices: int = 0
    """The same of the limit cuda-devices."""
    cpu_slots: int = 0
    """The same of the limit cpu-slots."""
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

    @property
    def limits(self) -> dict[str, int]:
        """Slots by limit."""
        return {NPUS: self.npus, CUDA_DEVICES: self.cuda_devices, CPU_SLOTS: self.cpu_slots}


def deploy_flows(recipe: str, overrides: Sequence[str], choices: Choices) -> dict[str, str]:
    """Update the server that PREFECT_API_URL names; returns rows for the console, with the schedules that the server
    then has. Raises BadInput before anything is changed. The same command repairs a deploy that failed midway, because
    what a whole deploy sets does not depend on what is left of another."""
    tree = read_deployments(recipe, overrides, choices)
    known = read_pools(choices.pools)
    templates = {
        name: read_template(name, known) for name in sorted({one["work_pool"]["name"] for one in tree["deployments"]})
    }
    config = load_config(recipe, list(overrides))
    server = _server()
    try:
        return {"Prefect server": server, **_change_server(tree, templates, config, choices)}
    except (httpx.HTTPError, MetronomeError) as error:
        raise MetronomeError(f"{error}\nRepair: the same command once more, when the server answers") from error


def _change_server(
    tree: Mapping[str, Any],
    templates: Mapping[str, tuple[str, JsonObject]],
    config: Config,
    choices: Choices,
) -> dict[str, str]:
    _keep_timezone(tree)
    _make_pools(templates)
    kind, base = templates[choices.pool]
    limits = _set_limits(choices, kind)
    if kind != PROCESS:
        limits += _limit_runs(choices, base, config)
    _deploy(tree)
    rows = {name: _row(one) for name, one in _on_server(tree).items()}
    made = [trigger["name"] for one in tree["deployments"] for trigger in one.get("triggers", ())]
    if choices.notify:
        made += alerts.install_alerts(choices.notify, _notify_format(choices), choices.notify_wait)
    return {
        "work pools": ", ".join(templates),
        "devices": limits,
        **rows,
        "automations": "; ".join(made),
        "crashed runs": _who_resumes(),
        "start a worker": " and ".join(_worker_command(name, kind, choices) for name, (kind, _) in templates.items()),
    }


def read_deployments(recipe: str, overrides: Sequence[str], choices: Choices) -> JsonObject:
    """The content of infra/prefect.yaml, with name, recipe, pools, schedules and the addresses of this shell's servers
    filled in. Raises BadInput."""
    _check(choices)
    tree: JsonObject = yaml.safe_load(FILE.read_text())
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
            if read_template(choices.rollout_pool, read_pools(choices.pools))[0] != PROCESS:
                one["parameters"]["host"] = "0.0.0.0"  # of the pod, which the network policy guards
        if name == NIGHTLY:
            changed = {"cron": choices.training, "timezone": choices.timezone, "active": True}
            one["schedules"] = [schedule | changed for schedule in one["schedules"] if choices.training]
        one["work_pool"]["job_variables"] = {"env": _worker_environment(choices, one["work_pool"]["name"])}
        if choices.name:
            _rename(one, choices.name)
    return tree


def _rename(one: JsonObject, name: str) -> None:
    """Make a deployment one of `--name`: its name, its tag, and the events of its own trainings only."""
    one["name"] = named_deployment(one["name"], name)
    one["tags"] = [*one["tags"], name]
    for trigger in one.get("triggers", ()):
        trigger["name"] += f" ({name})"
        trigger["match"]["metronome.evaluation"] = one["name"]


def _worker_environment(choices: Choices, pool: str) -> dict[str, str]:
    """What flow runs of a deployment need of this shell: addresses, and no secrets, which Prefect would show in clear.
    The pool's own variables count before it. Pods do not see this machine's loopback."""
    own = read_pools(choices.pools)
    known = read_template(pool, own)[1]["variables"]["properties"]["env"]["default"] if pool in own else {}
    env = {DEPLOY: choices.name} if choices.name else {}
    for key in ADDRESSES:
        value = os.environ.get(key, "")
        local = re.match(r"https?://(localhost|127\.|\[::1\])", value)
        pods = pool in own and read_template(pool, own)[0] == "kubernetes"
        plain = value.startswith(("http://", "https://")) and without_password(value) == value
        if plain and key not in known and not (local and pods):
            env[key] = value
    return env


def _check(choices: Choices) -> None:
    if choices.name and not re.fullmatch(NAME, choices.name):
        raise BadInput(f"--name {choices.name}: expected letters, digits, - and _, beginning with a letter or digit")
    try:
        CronSchedule(cron=choices.training or NIGHTLY_TRAINING, timezone=choices.timezone or UTC)
    except ValidationError as error:
        wrong = f"--timezone {choices.timezone}: no such time zone; expected a name such as Asia/Shanghai"
        if error.errors()[0]["loc"] == ("cron",):
            wrong = (
                f'--training "{choices.training}": not a cron line; expected minute, hour, day, month and weekday, '
                f'for example "{NIGHTLY_TRAINING}" for every day at 22:00'
            )
        raise BadInput(wrong) from None
    _notify_format(choices)
    counts = {OPTIONS[limit]: slots for limit, slots in choices.limits.items()}
    for option, count in (*counts.items(), ("--on-rollout-pool", choices.on_rollout_pool)):
        if count < 0:
            raise BadInput(f"{option} {count}: expected 0 or more")


def _notify_format(choices: Choices) -> str:
    told = choices.notify not in ("", alerts.OFF)
    return alerts.choose_format(choices.notify, choices.notify_format) if told else ""


def _server() -> str:
    """URL of the server. Raises BadInput if none is named, if it does not answer, or if it wants another password."""
    url = get_current_settings().api.url
    if not url:
        raise BadInput(
            "no Prefect server: set PREFECT_API_URL; `make services` starts one and writes its address and password to "
            "runs/services/env: . runs/services/env"
        )
    with get_client(sync_client=True) as client:
        if error := client.api_healthcheck():
            raise BadInput(f"the Prefect server at {url} (PREFECT_API_URL) does not answer: {error}")
        try:
            client.read_work_pools(limit=1)
        except PrefectHTTPStatusError as error:
            if error.response.status_code != httpx.codes.UNAUTHORIZED:
                raise
            given = f"the one in {CLIENT_AUTH} is wrong" if os.environ.get(CLIENT_AUTH) else f"set {CLIENT_AUTH}"
            raise BadInput(
                f"the Prefect server at {url} wants a user and password: {given} (USER:PASSWORD); `make services` "
                "writes them to runs/services/env: . runs/services/env"
            ) from None
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


def _set_limits(choices: Choices, kind: str) -> str:
    """Set the limits that were chosen, and that of CUDA devices by this machine if there is none and the worker of the
    training pool (of type `kind`) may run here. Return what is counted then, and what is not."""
    wanted = {limit: slots for limit, slots in choices.limits.items() if slots}
    with get_client(sync_client=True) as client:
        known = {one.name for one in client.read_global_concurrency_limits(limit=LIMITS)}
        here = visible_cuda_devices() if kind == PROCESS else 0
        derived = {CUDA_DEVICES: here} if here and CUDA_DEVICES not in {*known, *wanted} else {}
        for limit, slots in (wanted | derived).items():
            client.upsert_global_concurrency_limit_by_name(limit, slots)
        made = {one.name: one.limit for one in client.read_global_concurrency_limits(limit=LIMITS)}
    found = [
        f"{limit} {made[limit]}" + (f" (of this machine; {OPTIONS[limit]} N changes it)" if limit in derived else "")
        for limit in OPTIONS
        if limit in made
    ]
    found += [f"{what} NOT counted ({OPTIONS[limit]} N)" for limit, what in UNCOUNTED.items() if limit not in made]
    if NPUS not in made and "ascend" in choices.pool:
        found.append(f"runs on NPUs are REFUSED ({OPTIONS[NPUS]} N)")
    return ", ".join(found)


def _limit_runs(choices: Choices, base: JsonObject, config: Config) -> str:
    """Let the training pool's queue `default` start only as many runs at once as have room with all their nodes and
    instances: a pod holds its own devices before its run can wait for the others. Return a text about it. `base`: the
    pool's template."""
    requested = " ".join(base["variables"]["properties"]["resources"]["default"])
    device = "npu" if "huawei.com/" in requested else "cuda" if "nvidia.com/" in requested else "cpu"
    known = config.model_copy(update={"platform": config.platform.model_copy(update={"device": device})})
    needed, limit = count_devices(known, choices.on_rollout_pool)
    with get_client(sync_client=True) as client:
        there = {one.name: one.limit for one in client.read_global_concurrency_limits(limit=LIMITS)}
        if limit not in there or not needed:
            return ""
        runs = max(1, there[limit] // needed)
        queue = client.read_work_queue_by_name("default", choices.pool)
        client.update_work_queue(queue.id, concurrency_limit=runs)
    return f", {counted(runs, 'run')} at once on {choices.pool}"


def _keep_timezone(tree: Mapping[str, Any]) -> None:
    """Fill in the time zone of a schedule for which none was chosen: the one that the deployment has on the server."""
    there = _on_server(tree)
    for one in tree["deployments"]:
        known = there[one["name"]].schedules if one["name"] in there else []
        zones = [found.schedule.timezone for found in known if isinstance(found.schedule, CronSchedule)]
        for schedule in one.get("schedules", ()):
            schedule["timezone"] = schedule["timezone"] or next(filter(None, zones), UTC)


def _on_server(tree: Mapping[str, Any]) -> dict[str, DeploymentResponse]:
    """The deployments as the server has them, by name."""
    entrypoints = {one["name"]: one["entrypoint"] for one in tree["deployments"]}
    wanted = DeploymentFilter(name=DeploymentFilterName(any_=list(entrypoints)))
    with get_client(sync_client=True) as client:
        found = {one.name: one for one in client.read_deployments(deployment_filter=wanted)}
    return {
        name: found[name] for name, place in entrypoints.items() if name in found and found[name].entrypoint == place
    }


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
        raise MetronomeError(f"prefect deploy exited with {done.returncode}:\n{_reason(done.stdout + done.stderr)}")


def _reason(output: str) -> str:
    """The end of what a command has printed; of a traceback only the error."""
    lines = output.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    first = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), 0)
    return "\n".join(lines[first:])[-2000:]


def _row(one: DeploymentResponse) -> str:
    """What a deployment on the server does."""
    when = [
        f", {found.schedule.cron} {found.schedule.timezone}{'' if found.active else ' (paused)'}"
        for found in one.schedules
        if isinstance(found.schedule, CronSchedule)
    ]
    if NIGHTLY in one.tags and not when:
        when = [", no schedule (--schedule adds one)"]
    return f"{str(one.entrypoint).rpartition('.')[2]} on {one.work_pool_name}{''.join(when)}"


def _who_resumes() -> str:
    seen = watchdog.last_seen()
    if seen is not None and seen < watchdog.SILENCE_S:
        return f"resumed by the watchdog, which looked {max(0.0, seen):.0f} s ago"
    start = shlex.join([sys.executable, "-m", "tasks.cluster.watchdog"])
    return f"NOT resumed: no watchdog has looked within {watchdog.SILENCE_S / 60:.0f} minutes; start one: {start}"


def _worker_command(pool: str, kind: str, choices: Choices) -> str:
    """The command that starts a worker. A worker of processes takes one flow run at a time, unless NPUs are counted or
    runs take instances from its own pool."""
    own_instances = choices.on_rollout_pool and choices.pool == choices.rollout_pool
    if kind != PROCESS:
        return shlex.join([own_program("prefect"), "worker", "start", "--pool", pool])
    limit = ["--limit", "1"] if "ascend" not in pool and not own_instances else []
    return shlex.join([sys.executable, "-m", "tasks.cluster.graceful_worker", "--pool", pool, *limit])
