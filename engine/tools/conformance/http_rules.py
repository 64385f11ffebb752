"""Rules of requests and errors: health, token, malformed requests, limits, load."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from engine.errors import DeadlineError
from engine.tools.conformance.rules import demand, rule
from engine.tools.conformance.tried_engine import RefusedCall, TriedEngine
from engine.types import JsonObject
from engine.wire.access_token import VARIABLE, is_loopback
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL

LOAD_S = 1.0
"""Seconds within which GET /load must answer, even if the engine is busy."""
BUSY = 32
"""Number of requests that keep an engine busy."""
SMALL = 2**16
TOKEN_BYTES = 16
WEIGHTS = 2**24
"""Limits of bodies in bytes (docs/protocol.md)."""
CHUNK = 2**16
EARLY_S = 1.0
"""Seconds during which an engine may refuse a body that it has not read."""
GUARDED = (
    ("POST", "/v1/completions"),
    ("GET", "/load"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/begin_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
)
"""Routes that need the token."""


@rule("health", "GET /health answers without a token, with the version of the protocol and the world size")
async def health(engine: TriedEngine) -> str:
    """The orchestrator calls it before anything else."""
    answer = await engine.ask("GET", "/health", headers={})
    found = answer.json
    demand(answer.status == 200, f"it answered {answer}")
    protocol = found.get("protocol") if isinstance(found, dict) else None
    demand(protocol == ROLLOUT_PROTOCOL, f"protocol {protocol!r}, expected {ROLLOUT_PROTOCOL}")
    size = found.get("world_size")
    demand(type(size) is int and size >= 1, f"world_size {size!r}, expected at least 1: broadcasts need it")
    return f"protocol {protocol}, world size {size}"


@rule("token", "every other route refuses a request without the token, and with a wrong one: 401")
async def token(engine: TriedEngine) -> str:
    """Without a token, an engine listens only on loopback."""
    if engine.token is None:
        host = urlsplit(engine.url).hostname or ""
        demand(_is_loopback(host), f"{VARIABLE} is not set, and {host} is not a loopback address")
        return f"{VARIABLE} is not set, which is allowed on loopback"
    for method, path in GUARDED:
        for headers in ({}, {"Authorization": f"Bearer {engine.token}x"}, {"Authorization": f"Basic {engine.token}"}):
            body = b"{}" if method == "POST" else None
            answer = await engine.ask(method, path, body, headers)
            demand(answer.status == 401, f"{method} {path} with the headers {sorted(headers)} answered {answer}")
    return f"{len(GUARDED)} routes"


def _is_loopback(host: str) -> bool:
    try:
        return is_loopback(host)
    except ValueError:
        return False


@rule("errors", "a request that can't be served is refused with the right status and a message, and has no effect")
async def errors(engine: TriedEngine) -> str:
    """A wrong status would stop a run, or cause endless retries."""
    vocabulary = engine.reference.vocabulary
    before = (await engine.load()).generated_tokens
    cases: list[tuple[int, str, str, JsonObject | bytes | None]] = [
        (400, "POST", "/v1/completions", b"{"),
        (400, "POST", "/v1/completions", b"[1]"),
        (400, "POST", "/v1/completions", engine.body(prompt=[])),
        (400, "POST", "/v1/completions", engine.body(prompt=[vocabulary])),
        (400, "POST", "/v1/completions", engine.body(prompt=[-1])),
        (400, "POST", "/v1/completions", engine.body(n=2)),
        (400, "POST", "/v1/completions", engine.body(max_tokens=0)),
        (400, "POST", "/v1/completions", engine.body(temperature=-1)),
        (400, "POST", "/v1/completions", engine.body(seed=2**63)),
        (400, "POST", "/v1/completions", engine.body(never_heard_of=1)),
        (400, "POST", "/pause?mode=keep", b"{}"),
        (400, "POST", "/begin_weight_update?mode=keep", b"{}"),
        (404, "GET", "/never_heard_of", None),
        (405, "GET", "/v1/completions", None),
    ]
    answer = await engine.ask("POST", "/v1/completions", engine.body(prompt=[0] * (engine.reference.positions + 1)))
    demand(answer.status in (400, 413), f"a prompt of more tokens than the model has positions was answered {answer}")
    for status, method, path, body in cases:
        answer = await engine.ask(method, path, body)
        what = f"{method} {path} with {str(body)[:80]}"
        demand(answer.status == status, f"{what} answered {answer}, expected {status}")
        demand(bool(answer.error), f"{what} answered {answer}: no error with message, type and code")
    after = (await engine.load()).generated_tokens
    demand(after == before, f"{after - before} tokens were sampled for refused requests")
    return f"{len(cases) + 1} wrong requests"


@rule("limits", "bodies larger than the protocol's limits are refused: 413")
async def limits(engine: TriedEngine) -> str:
    """A run may be contacted by foreign clients."""
    ids = engine.reference.positions + engine.reference.vocabulary
    cases = {"/v1/completions": SMALL + TOKEN_BYTES * ids, "/pause": SMALL, "/update_weights": WEIGHTS}
    for path, limit in cases.items():
        status = await _status_of_large(engine, path, limit + 1)
        demand(status == 413, f"POST {path} with {limit + 1} bytes answered {status}, expected 413")
    return ", ".join(f"{path} {limit + 1}" for path, limit in cases.items()) + " bytes"


async def _status_of_large(engine: TriedEngine, path: str, size: int) -> int:
    """Send a body of spaces until the engine answers, and return the status. The engine may answer before it has
    received the whole body."""
    place = urlsplit(engine.url)
    lines = [f"POST {path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close", f"Content-Length: {size}"]
    lines += [f"Authorization: Bearer {engine.token}"] if engine.token is not None else []
    try:
        async with asyncio.timeout(engine.timeout_s):
            reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
            writer.write("\r\n".join([*lines, "", ""]).encode())
            answer = asyncio.create_task(reader.readline())
            await asyncio.wait([answer], timeout=EARLY_S)  # an unread body would break the connection
            sending = asyncio.create_task(_send(writer, 0 if answer.done() else size))
            try:
                line = await answer
            finally:
                for task in (answer, sending):
                    task.cancel()
                await asyncio.gather(answer, sending, return_exceptions=True)
                writer.close()
    except TimeoutError:
        raise DeadlineError(f"no answer to POST {path} with {size} bytes in {engine.timeout_s:g} s") from None
    except OSError as error:
        raise RefusedCall(f"POST {path} with {size} bytes: {type(error).__name__} {error}") from None
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _send(writer: asyncio.StreamWriter, size: int) -> None:
    for sent in range(0, size, CHUNK):
        writer.write(b" " * min(CHUNK, size - sent))
        await writer.drain()


@rule("load", "GET /load gives running, waiting, generated_tokens and weight_version within a second, also when busy")
async def load(engine: TriedEngine) -> str:
    """The orchestrator considers an engine dead if its answer is slow (rollout.heartbeat_s)."""
    slowest = 0.0
    async with engine.under_way(BUSY) as tasks:
        for _ in range(3):
            started = time.monotonic()
            seen = await engine.load()
            slowest = max(slowest, time.monotonic() - started)
            demand(min(seen.running, seen.waiting, seen.generated_tokens, seen.weight_version) >= 0, f"it says {seen}")
        busy = sum(not task.done() for task in tasks)
        demand(not busy or seen.running + seen.waiting > 0, f"{busy} requests are open, but it says {seen}")
    demand(slowest <= LOAD_S, f"it took {slowest:.1f} s with {BUSY} requests, expected at most {LOAD_S:g} s")
    return f"at most {slowest * 1000:.0f} ms with {BUSY} requests"
