"""`metronome serve`: runs one instance in the foreground. With --join it joins a running run, and leaves it cleanly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import aiohttp
import msgspec

from engine.config import Config
from engine.errors import BadInput, DeadlineError, ProcessDied
from engine.model.shape import content_hash
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.limits import loading_s
from engine.run.process import Child
from engine.run.served_model import weight_version
from engine.wire.access_token import (
    VARIABLE,
    access_token,
    authorization_headers,
    check_address,
    folder_token,
    own_token,
)
from engine.wire.address import (
    ADDRESS_FILE,
    http_url,
    orchestrator_address,
    reachable_host,
    split_address,
)
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL, GetStatus, InstanceRequest, Join, Leave, read_answer

CALL_S = 10.0
"""Time limit of one call to the orchestrator, in seconds."""
SOON_S = 1.0
"""Seconds between two calls until the instance serves for the first time: the user is waiting for that message."""
TOO_EARLY = 425
"""Status with which an orchestrator answers while it takes no instances yet."""
POLL_S = 0.2
"""Seconds between two checks of a leaving instance whether it may go."""

Reply = TypeVar("Reply")
Say = Callable[[str], None]


class _Refused(NamedTuple):
    """A reply of the orchestrator with a status other than 200."""

    status: int
    message: str


class _Left(Exception):
    """Someone else told the orchestrator that this instance leaves."""


def default_name() -> str:
    """Return host name and process id, unique among the instances that join a run."""
    return f"{socket.gethostname()}-{os.getpid()}"


def serve_alone(config: Config, name: str, host: str, port: int, text: str = "") -> int:
    """Run one instance until it ends, or until SIGTERM or Ctrl-C. Return its exit code. `text`: the model's name, if
    the instance shall answer text requests."""
    return _run(_serve(config=config, name=name, host=host, port=port, text=text))


def check_join(address: str) -> None:
    """Raise BadInput unless it is a run folder, a run's address file, or host:port."""
    path = Path(address).expanduser()
    if path.is_dir() or path.name == ADDRESS_FILE:
        return
    if ":" not in address:
        raise BadInput(
            f"--join {address}: there is no run folder {path.absolute()}; give one, or host:port of a run's "
            "orchestrator"
        )
    if split_address(address, "--join")[1] == 0:
        raise BadInput(
            f"--join {address}: port 0 is not valid here; give the port on which the run's orchestrator listens"
        )


def serve_joined(config: Config, address: str, name: str, host: str, port: int, say: Say) -> int:
    """Run an instance that joins the run, serves until SIGTERM or Ctrl-C, then leaves and ends. A second signal ends it
    at once. Return the exit code.

    `address` is as in `check_join`. Raises BadInput if the orchestrator refuses the instance, ProcessDied if the
    instance ends, DeadlineError if the orchestrator does not answer. Before the first answer the limit is
    rollout.timeout_s, so that an instance may be started before its run; later it is rollout.wait_s.
    """
    return _run(_serve(config=config, name=name, host=host, port=port, address=address, say=say))


def _run(serving: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(serving)
    except asyncio.CancelledError:
        return 130


async def _serve(
    config: Config, name: str, host: str, port: int, text: str = "", address: str = "", say: Say = print
) -> int:
    """Run an instance; with an `address`, as a member of the run there."""
    check_address(host, access_token())
    asked = _signals()
    model = Path(config.model.path)
    token = own_token()
    with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
        port_file = Path(scratch) / "address"
        command, env = instance_command(
            config=config, model=model, name=name, number=0, port_file=port_file, port=port, host=host
        )
        command += ["--text", text, f"--policy-version={weight_version(model)}"] if text else []
        child = Child(name, command, None, env | ({VARIABLE: token} if address else {}))
        limit_s = max(config.rollout.timeout_s, loading_s(model))
        orchestrator = None
        if address:
            weights = await asyncio.to_thread(content_hash, model)  # the instance loads the files at the same time
            orchestrator = _OrchestratorClient(
                config=config, address=address, name=name, token=token, weights=weights, say=say
            )
        try:
            return await _serve_child(
                child=child, port_file=port_file, limit_s=limit_s, asked=asked, orchestrator=orchestrator
            )
        finally:
            await asyncio.to_thread(child.stop)


async def _serve_child(
    child: Child, port_file: Path, limit_s: float, asked: asyncio.Event, orchestrator: _OrchestratorClient | None
) -> int:
    try:
        address = await _unless(asked, InstanceProcess(0, child, port_file).serves(limit_s))
    except (BadInput, ProcessDied):
        if child.process.returncode < 0:
            raise
        return int(child.process.returncode)  # the instance has printed the reason
    if address is not None and orchestrator is not None:
        await orchestrator.stay(child, address, asked)
        return 0
    await _unless(asked, asyncio.to_thread(child.process.wait))
    return 0 if asked.is_set() else int(child.process.returncode)


def _signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets. The second one cancels this task."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    asked = asyncio.Event()
    assert task is not None

    def ask() -> None:
        if asked.is_set():
            task.cancel()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    return asked


async def _unless(asked: asyncio.Event, work: Any) -> Any:  # noqa: ANN401
    """Return the result of `work`, or None if `asked` is set first."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


class _OrchestratorClient:
    """Calls the orchestrator of the run."""

    def __init__(self, config: Config, address: str, name: str, token: str, weights: str, say: Say) -> None:
        """`token`: the instance's. `weights`: as in `Join`."""
        self._rollout = config.rollout
        self._token = token
        self._weights = weights
        self._address = address
        self._name = name
        self._url = ""
        """URL at which the orchestrator reaches the instance."""
        self._say = say
        self._heard = time.monotonic()
        self._state = ""
        self._served = False
        self._met = False
        """Whether the orchestrator has ever answered."""
        self._told = False

    async def stay(self, child: Child, served: tuple[str, int], asked: asyncio.Event) -> None:
        """Send a sign of life every rollout.heartbeat_s until asked to stop, then leave. An orchestrator that does not
        know the instance adds it. `served`: host and port at which the instance listens."""
        self._url = http_url(reachable_host(served[0]), served[1])
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as self._session:
            try:
                while not asked.is_set():
                    child.check_alive()
                    await self._join()
                    pause_s = self._rollout.heartbeat_s
                    await _unless(asked, asyncio.sleep(pause_s if self._served else min(SOON_S, pause_s)))
            except _Left:
                pass  # at someone else's request
            else:
                await self._leave()
            await self._drained(child)

    async def _join(self) -> None:
        join = Join(
            protocol=ROLLOUT_PROTOCOL,
            name=self._name,
            url=self._url,
            again=bool(self._state),
            token=self._token,
            weights=self._weights,
        )
        answer = await self._call(join)
        if not self._met and not self._told:
            self._told = True
            limit, key = self._patience
            what = f"the run at {self._address} to begin, or to be resumed if it has ended"
            self._say(f"{self._name} waits for {what}, for up to {limit:g} s ({key})")
        if isinstance(answer, _Refused) and answer.status == 410:
            raise _Left
        if isinstance(answer, _Refused):
            raise BadInput(
                f"the orchestrator at {self._address} refuses {self._name}: {answer.status} {answer.message}"
            )
        if answer is not None and answer.state != self._state:
            self._state = answer.state
            self._served |= self._state == "serving"
            self._say(f"{self._name} at {self._url} is {self._state} in the run at {self._address}")

    async def _leave(self) -> None:
        if self._state:
            self._say(f"{self._name} leaves the run at {self._address}")
            await self._call(Leave(self._name))

    async def _drained(self, child: Child) -> None:
        """Wait until the orchestrator has dropped this instance or stopped responding."""
        deadline = time.monotonic() + self._rollout.timeout_s
        while child.alive and (reply := await self._call(GetStatus())) is not None:
            if isinstance(reply, _Refused) or self._name not in [one.name for one in reply.instances]:
                return
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self._name} still holds responses after {self._rollout.timeout_s:.0f} s; stopping it"
                )
            await asyncio.sleep(POLL_S)

    @property
    def _patience(self) -> tuple[float, str]:
        """Seconds for which the orchestrator may be silent, and the key that sets them."""
        return self._rollout.patience(self._met)

    async def _call(self, request: InstanceRequest[Reply]) -> Reply | _Refused | None:
        """Return the orchestrator's reply or refusal; None if it does not answer.

        Raises DeadlineError if the orchestrator has been silent for rollout.wait_s, or, before its first answer, for
        rollout.timeout_s.
        """
        data = msgspec.json.encode(request) if request.method == "POST" else None
        try:
            url = f"http://{orchestrator_address(self._address)}{request.path}"
            headers = {"Accept-Encoding": "identity", **authorization_headers(folder_token(self._address))}
            async with self._session.request(
                request.method, url, data=data, headers=headers, allow_redirects=False
            ) as answer:
                raw = await read_answer(answer, request.largest_reply)
                if answer.status == TOO_EARLY:
                    raise aiohttp.ClientError(_message(raw))
                reply = (
                    msgspec.json.decode(raw, type=request.reply)
                    if answer.status == 200
                    else _Refused(answer.status, _message(raw))
                )
            self._heard = time.monotonic()
            self._met = True
            return cast(Reply, reply)
        except (
            aiohttp.ClientError,
            OSError,
            ValueError,
        ) as error:  # also time-outs and bad JSON
            silence = time.monotonic() - self._heard
            limit, key = self._patience
            if silence > limit:
                raise DeadlineError(
                    f"the orchestrator at {self._address} did not answer for {silence:.0f} s ({key}): "
                    f"{type(error).__name__} {error}"
                ) from None
            return None


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return raw[:300].decode(errors="replace")
