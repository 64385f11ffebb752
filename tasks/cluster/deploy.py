"""Creates work pools, the limit on NPUs, deployments with schedules, and automations on the Prefect server.

A second deploy updates all of them; nothing is created twice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import httpx
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import get_current_settings

from engine.config.recipe import HOME, load
from engine.errors import BadInput, MetronomeError
from engine.types import JsonObject
from tasks.cluster import watchdog
from tasks.cluster.devices import LIMIT
from tasks.cluster.form import show_recipe
from tasks.cluster.pools import read_pools, template

FILE = HOME / "infra/prefect.yaml"
"""The deployments."""
TRAINING = ("pipeline", "nightly", "train", "evaluate", "nightly-evaluation", "join-training")
"""Deployments on the training pool. Their runs start rollout instances, and trainer ranks unless they only evaluate."""
WITH_ROLLOUTS = ("pipeline", "nightly", "train", "evaluate", "nightly-evaluation")
"""Deployments of the training pool that can take instances from the rollout pool."""
ROLLOUTS = "serve-rollouts"
DEPLOY_S = 300.0
"""Time limit of `prefect deploy`, which takes 2 s on an idle machine."""


NIGHTLY_TRAINING = "0 22 * * *"
NIGHTLY_EVALUATION = "0 6 * * *"
"""Cron lines of --schedule."""


@dataclass(frozen=True)
class Choices:
    """The options of a deploy, in addition to the recipe."""

    pool: str = "cpu"
    """Work pool of everything that trains or evaluates."""
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
    """Default number of instances that a training or an evaluation takes from the rollout pool, also when it is
    scheduled."""
    pools: Path | None = None
    """A list of work pools in addition to that of infra/pools."""


def deploy(recipe: str, overrides: Sequence[str], choices: Choices) -> dict[str, str]:
    """Update the server that PREFECT_API_URL names; returns rows for the console. Raises BadInput, MetronomeError."""
    tree = deployments(recipe, overrides, choices)
    pools = sorted({one["work_pool"]["name"] for one in tree["deployments"]})
    known = read_pools(choices.pools)
    templates = {name: template(name, known) for name in pools}
    server = _server()
    _make_pools(templates)
    if choices.npus:
        with get_client(sync_client=True) as client:
            client.upsert_global_concurrency_limit_by_name(LIMIT, choices.npus)
    _deploy(tree)
    show_recipe({one["name"]: one["entrypoint"] for one in tree["deployments"]}, load(recipe, list(overrides)))
    watched = watchdog.install()
    return {
        "Prefect server": server,
        "work pools": ", ".join(pools),
        **{one["name"]: _row(one) for one in tree["deployments"]},
        "automations": ", ".join([*_triggers(tree), *watched]),
        "start a worker": " and ".join(f"prefect worker start --pool {name}" for name in pools),
    }


def deployments(recipe: str, overrides: Sequence[str], choices: Choices) -> JsonObject:
    """infra/prefect.yaml with recipe, pools and schedules put in."""
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
    for option, count in (("--npus", choices.npus), ("--on-rollout-pool", choices.on_rollout_pool)):
        if count < 0:
            raise BadInput(f"{option} {count}: expected 0 or more")


def _server() -> str:
    """URL of the server. Raises BadInput when none is named or it does not answer."""
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
            raise MetronomeError(f"prefect deploy is not done after {DEPLOY_S:.0f} s") from None
    if done.returncode:
        raise MetronomeError(f"prefect deploy exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _row(one: Mapping[str, Any]) -> str:
    when = [f", {each['cron']} {each['timezone']}" for each in one.get("schedules", ())]
    if "schedules" in one and not when:
        when = [", no schedule (--schedule gives it one)"]
    return f"{one['entrypoint'].rpartition('.')[2]} on {one['work_pool']['name']}{''.join(when)}"


def _triggers(tree: Mapping[str, Any]) -> list[str]:
    return [trigger["name"] for one in tree["deployments"] for trigger in one.get("triggers", ())]
