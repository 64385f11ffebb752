"""The conformance suite: tries every rule on an engine, one after the other, and reports which ones hold."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from engine.errors import BadInput, MetronomeError
from engine.orchestrator.publish.probe import UNMEASURED
from engine.tools.conformance.reference import Reference
from engine.tools.conformance.rules import DEFINED, ProtocolRule
from engine.tools.conformance.tried_engine import EngineCalls, TriedEngine
from engine.wire.access_token import access_token

RULES: Sequence[ProtocolRule] = sorted(DEFINED, key=lambda rule: not rule.required)
"""All rules, in the order in which they are tried: as they are defined, and those that are not required at the end."""
RULE_S = 10
"""Time limit of a rule, as a multiple of the deadline of a call."""

Say = Callable[[str], None]


def conform(
    url: str, model: str, dtype: str, shared: Path | None, timeout_s: float, only: Sequence[str], say: Say
) -> bool:
    """Try the rules (only those in `only`, if any), print a line for each, and return whether all required ones hold.

    `model`: the folder that the engine serves; "" means the one that its replies name. `shared`: a folder for files of
    weights that the engine can read. Raises BadInput if no engine answers there, if it is in use, or if there is no
    such model or rule.
    """
    unknown = sorted(set(only) - {rule.name for rule in RULES})
    if unknown:
        raise BadInput(f"--only {unknown[0]}: no such rule; rules are {', '.join(rule.name for rule in RULES)}")
    if dtype not in UNMEASURED:
        raise BadInput(f"--dtype {dtype}: expected one of {', '.join(UNMEASURED)}")
    if shared is not None and not shared.is_dir():
        raise BadInput(f"--shared {shared}: there is no such folder")
    chosen = [rule for rule in RULES if not only or rule.name in only]
    url = _checked(url)
    with tempfile.TemporaryDirectory(prefix="metronome-", dir=shared) as scratch:
        return asyncio.run(
            _conform(
                url=url, model=model, dtype=dtype, scratch=Path(scratch), timeout_s=timeout_s, rules=chosen, say=say
            )
        )


def _checked(url: str) -> str:
    place = urlsplit(url)
    try:
        right = place.scheme == "http" and place.hostname and (place.port or 80) and place.path in ("", "/")
    except ValueError:
        right = False
    if not right or place.query or place.username:
        raise BadInput(f"{url}: expected the address of an engine, for example http://127.0.0.1:8000")
    return url.rstrip("/")


HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


async def _conform(
    url: str, model: str, dtype: str, scratch: Path, timeout_s: float, rules: Sequence[ProtocolRule], say: Say
) -> bool:
    token = access_token()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False) as session:
        folder = await _model(EngineCalls(url, session, token, timeout_s), model)
        engine = TriedEngine(
            url=url, session=session, token=token, reference=Reference(folder, dtype, scratch), timeout_s=timeout_s
        )
        await _check_unused(engine)
        width = max(len(rule.name) for rule in rules)
        try:
            broken = [rule for rule in rules if not await _tried(engine, rule, width, say)]
        except asyncio.CancelledError:  # Ctrl-C
            with suppress(MetronomeError):
                await engine.restore()
            raise
    failed = [rule.name for rule in broken if rule.required]
    needed = sum(rule.required for rule in rules)
    if failed:
        say(f"{url} does not conform: {len(failed)} of {needed} required rules are broken: {', '.join(failed)}")
    else:
        say(f"{url} conforms: {needed} required rules hold, and {len(rules) - needed - len(broken)} others")
    return not failed


async def _tried(engine: TriedEngine, rule: ProtocolRule, width: int, say: Say) -> bool:
    """Try a rule, restore the state of the engine, print a line, and return whether the rule holds."""
    try:
        async with asyncio.timeout(RULE_S * engine.timeout_s):
            seen = await rule.check(engine)
        holds = True
    except (MetronomeError, TimeoutError) as error:
        seen = f"{error or 'it took too long'} (the rule: {rule.text})"
        holds = False
    try:
        await engine.restore()
    except MetronomeError as error:
        seen += f"; and it could not be brought back: {error}"
    verdict = "pass" if holds else "FAIL" if rule.required else "no  "
    note = "" if rule.required else "  [not required]"
    say(f"{rule.name:<{width}}  {verdict}  {' '.join(seen.split())}{note}")
    return holds


async def _model(engine: EngineCalls, given: str) -> Path:
    """The folder of the model. Raise BadInput if nothing answers at the address, or if no folder is known."""
    try:
        await engine.ask("GET", "/health")
        asked = {"prompt": [0], "max_tokens": 1}
        reply = None if given else (await engine.ask("POST", "/v1/completions", asked)).json
    except MetronomeError as error:
        raise BadInput(f"{engine.url}: no engine answers there: {error}") from None
    named = str(reply.get("model", "")) if isinstance(reply, dict) else ""
    folder = Path(given or named).expanduser()
    if not (folder / "config.json").is_file():
        said = f"--model {given}" if given else f"the engine names the model {named!r}"
        raise BadInput(
            f"{said}: that is not a Hugging Face folder on this machine; give the one that it serves with --model"
        )
    return folder


async def _check_unused(engine: TriedEngine) -> None:
    """Raise BadInput if the engine seems to be part of a run, because the rules change its weights."""
    try:
        load = await engine.load()
    except MetronomeError:
        return  # a rule will report it
    if load.running + load.waiting > 0 or load.weight_version != 0:
        raise BadInput(
            f"{engine.url} is in use: it has {load.running + load.waiting} requests and weight version "
            f"{load.weight_version}. The rules change its weights: give a freshly started engine"
        )
