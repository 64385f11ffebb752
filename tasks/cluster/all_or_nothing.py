"""Puts back what a Prefect server had before a deploy that fails midway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client

from engine.errors import MetronomeError
from engine.run.logs import log_line
from engine.types import JsonObject

BACK_S = 60.0
"""Seconds that a server has to answer again before it is left as it is; systemd and compose restart one in less."""
MOST = 200
"""Number of automations that Prefect gives in one reply."""
_POOL = ("description", "is_paused", "base_job_template", "concurrency_limit")
_DEPLOYMENT = (
    *("name", "flow_id", "paused", "concurrency_options", "enforce_parameter_schema", "parameter_openapi_schema"),
    *("parameters", "tags", "labels", "pull_steps", "work_queue_name", "work_pool_name", "storage_document_id"),
    *("infrastructure_document_id", "description", "path", "version", "entrypoint", "job_variables"),
)
_SCHEDULE = ("schedule", "active", "max_scheduled_runs", "parameters", "slug")
_AUTOMATION = (
    *("name", "description", "enabled", "tags", "trigger"),
    *("actions", "actions_on_trigger", "actions_on_resolve"),
)
"""Fields with which the server makes or changes one of these; it gives more."""
Part = tuple[str, Callable[[SyncPrefectClient], None]]


@dataclass(frozen=True)
class Touched:
    """What a deploy makes or changes, by names."""

    pools: Sequence[str]
    limits: Sequence[str]
    deployments: Sequence[str]
    """FLOW/NAME each."""
    queues: Sequence[tuple[str, str]]
    """(work pool, name) each, besides the queues that pools have from their beginning."""
    automations: Sequence[str]
    blocks: Sequence[tuple[str, str]]
    """(slug of the type, name) each."""


@contextmanager
def all_or_nothing(touched: Touched) -> Iterator[None]:
    """Put back what the server had of `touched` if the deploy inside fails or is interrupted. Raises MetronomeError,
    which says why, and what could not be put back and how to repair it. After an interruption, this is logged, and the
    interruption goes on."""
    try:
        with get_client(sync_client=True) as client:
            before = _Before(client, touched)
    except httpx.HTTPError as error:
        raise MetronomeError(
            f"nothing is changed, since the Prefect server does not tell what it has: {error}"
        ) from error
    try:
        yield
    except BaseException as error:
        reason = str(error) or type(error).__name__
        log_line("the deploy has failed: the server is given back what it had")
        told = _outcome(before.put_back())
        if not isinstance(error, Exception):
            log_line(told)
            raise
        raise MetronomeError(f"{reason}\n{told}") from error


def _outcome(left: Sequence[str]) -> str:
    """What a failed deploy has changed, if `left` could not be put back."""
    if not left:
        return "Nothing is changed: the server has again what it had before."
    return (
        f"Not put back, so that it may be old or new: {'; '.join(left)}. Repair: the same command once "
        "more, when the server answers; what a whole deploy sets does not depend on what is left of another."
    )


class _Before:
    """What a server had of some names."""

    def __init__(self, client: SyncPrefectClient, touched: Touched) -> None:
        self._pools = {name: _get(client, f"/work_pools/{name}") for name in touched.pools}
        self._limits = {name: _get(client, f"/v2/concurrency_limits/{name}") for name in touched.limits}
        self._deployments = {name: _get(client, f"/deployments/name/{name}") for name in touched.deployments}
        self._flows = {
            name: _get(client, _flow(name)) for name in {one.partition("/")[0] for one in touched.deployments}
        }
        self._queues = {key: _get(client, _queue(*key)) for key in touched.queues}
        self._blocks = {key: _get(client, _block(*key), include_secrets=True) for key in touched.blocks}
        self._names = set(touched.automations)
        self._automations = _automations(client, self._names)

    def put_back(self) -> list[str]:
        """Put back all of it; returns what could not be, each with its reason."""
        parts: list[Part] = [
            *(
                (f"work pool {name}", _fields_back(f"/work_pools/{name}", old, _POOL))
                for name, old in self._pools.items()
                if old
            ),
            *(
                (f"limit {name}", _fields_back(f"/v2/concurrency_limits/{name}", old, ("limit",)))
                for name, old in self._limits.items()
            ),
            *((f"deployment {name}", self._deployment(name)) for name in self._deployments),
            *((f"queue {name} of {pool}", self._queue(pool, name)) for pool, name in self._queues),
            *((f"flow {name}", self._flow(name)) for name in self._flows),
            ("alerts and automations", self._rules),
            *(
                (f"work pool {name}", _fields_back(f"/work_pools/{name}", old, _POOL))
                for name, old in self._pools.items()
                if not old
            ),
        ]
        if not _answers():
            return [f"{what} (the server does not answer)" for what, _ in parts]
        left = []
        for what, put in parts:
            try:
                with get_client(sync_client=True) as client:
                    put(client)
            except Exception as error:
                left.append(f"{what} ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
        return left

    def _deployment(self, name: str) -> Callable[[SyncPrefectClient], None]:
        def put(client: SyncPrefectClient) -> None:
            now = _get(client, f"/deployments/name/{name}")
            old = self._deployments[name]
            if old and now != old:
                limit = old["global_concurrency_limit"]
                schedules = [_part(one, _SCHEDULE) for one in old["schedules"]]
                own = {"schedules": schedules, "concurrency_limit": limit["limit"] if limit else None}
                _send(client, "POST", "/deployments/", _part(old, _DEPLOYMENT) | own)
            elif now and not old:
                _send(client, "DELETE", f"/deployments/{now['id']}")

        return put

    def _queue(self, pool: str, name: str) -> Callable[[SyncPrefectClient], None]:
        """Deletes a queue that was not there, unless another deployment uses it by now."""

        def put(client: SyncPrefectClient) -> None:
            used = {"work_pools": {"name": {"any_": [pool]}}, "work_pool_queues": {"name": {"any_": [name]}}}
            made = not self._queues[pool, name] and _get(client, _queue(pool, name))
            if made and not _count(client, "deployments", used):
                _send(client, "DELETE", _queue(pool, name))

        return put

    def _flow(self, name: str) -> Callable[[SyncPrefectClient], None]:
        """Deletes a flow that was not there, unless it has another deployment or a run by now."""

        def put(client: SyncPrefectClient) -> None:
            made = None if self._flows[name] else _get(client, _flow(name))
            used = {"flows": {"name": {"any_": [name]}}}
            if made and not any(_count(client, kind, used) for kind in ("deployments", "flow_runs")):
                _send(client, "DELETE", f"/flows/{made['id']}")

        return put

    def _rules(self, client: SyncPrefectClient) -> None:
        """Blocks, then the automations that send with them: one that was deleted has another id now."""
        text = json.dumps(list(self._automations.values()))
        for key, old in self._blocks.items():
            now = _get(client, _block(*key), include_secrets=True)
            if now and old and now["data"] == old["data"]:
                continue
            if now and old:
                changed = {"data": old["data"], "block_schema_id": old["block_schema_id"], "merge_existing_data": False}
                _send(client, "PATCH", f"/block_documents/{now['id']}", changed)
            elif now:
                _send(client, "DELETE", f"/block_documents/{now['id']}")
            elif old:
                wanted = _part(old, ("name", "data", "block_schema_id", "block_type_id"))
                made = _send(client, "POST", "/block_documents/", wanted).json()
                text = text.replace(old["id"], made["id"])
        there = _automations(client, self._names)
        wanted_ones = {one["id"]: one for one in json.loads(text)}
        for number in there.keys() - wanted_ones.keys():
            _send(client, "DELETE", f"/automations/{number}")
        for number, one in wanted_ones.items():
            if number not in there:
                owner = {"owner_resource": one["owner_resource"]} if one.get("owner_resource") else {}
                _send(client, "POST", "/automations/", _part(one, _AUTOMATION) | owner)
            elif _part(there[number], _AUTOMATION) != _part(one, _AUTOMATION):
                _send(client, "PUT", f"/automations/{number}", _part(one, _AUTOMATION))


def _fields_back(path: str, old: JsonObject | None, names: Sequence[str]) -> Callable[[SyncPrefectClient], None]:
    """Gives what is at a path its old fields, or deletes it if there was nothing."""

    def put(client: SyncPrefectClient) -> None:
        now = _get(client, path)
        if now and old and _part(now, names) != _part(old, names):
            _send(client, "PATCH", path, _part(old, names))
        elif now and not old:
            _send(client, "DELETE", path)

    return put


def _answers() -> bool:
    """Whether the server answers within `BACK_S`: to a client of Prefect, which has the user's certificates and
    headers."""
    deadline = time.monotonic() + BACK_S
    while True:
        with get_client(httpx_settings={"timeout": 10.0}, sync_client=True) as client:
            if client.api_healthcheck() is None:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)


def _block(kind: str, name: str) -> str:
    return f"/block_types/slug/{kind}/block_documents/name/{name}"


def _flow(name: str) -> str:
    return f"/flows/name/{name}"


def _queue(pool: str, name: str) -> str:
    return f"/work_pools/{pool}/queues/{name}"


def _count(client: SyncPrefectClient, kind: str, which: JsonObject) -> int:
    return int(_send(client, "POST", f"/{kind}/count", which).json())


def _automations(client: SyncPrefectClient, names: set[str]) -> dict[str, JsonObject]:
    """Those with one of these names, by id."""
    found: dict[str, JsonObject] = {}
    page: list[JsonObject] = []
    offset = 0
    while offset == 0 or len(page) == MOST:
        page = _send(client, "POST", "/automations/filter", {"limit": MOST, "offset": offset}).json()
        found |= {one["id"]: one for one in page if one["name"] in names}
        offset += MOST
    return found


def _get(client: SyncPrefectClient, path: str, **parameters: Any) -> JsonObject | None:  # noqa: ANN401
    try:
        found: JsonObject = client.request("GET", path, params=parameters).json()  # type: ignore[arg-type]
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return None
        raise
    return found


def _send(client: SyncPrefectClient, method: Any, path: Any, body: Mapping[str, Any] | None = None) -> httpx.Response:  # noqa: ANN401
    return client.request(method, path, json=body) if body is not None else client.request(method, path)


def _part(whole: Mapping[str, Any], names: Sequence[str]) -> JsonObject:
    return {name: whole[name] for name in names if name in whole}
