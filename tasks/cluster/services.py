"""A Prefect server with its watchdog and an MLflow server on loopback, for one developer: `make services`.

A team has infra/compose, infra/kubernetes or infra/systemd.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.logs import log_error
from engine.run.process import Child, drop_lifeline, python_command, stop_all, watch_lifeline
from tasks.cluster.local_server import STARTUP_S
from tasks.cluster.prefect_api import CLIENT_AUTH, server_environment

HOST = "127.0.0.1"
ENV = "env"
"""File in the servers' folder with the variables for other shells: `. runs/services/env`."""


@dataclass(frozen=True)
class LoopbackServer:
    """How to start a server, and where it answers."""

    name: str
    port: int
    command: list[str]
    env: Mapping[str, str]
    health: str
    """Path that answers 200 when the server is ready."""

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    def answers(self) -> bool:
        """Whether it is ready."""
        try:
            urllib.request.urlopen(self.url + self.health, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def prefect_server(folder: Path, port: int, auth: str) -> LoopbackServer:
    """A Prefect server with its database in `folder`, that wants the user and password `auth`."""
    home = folder / "prefect"
    home.mkdir(parents=True, exist_ok=True)
    command = ["prefect", "server", "start", "--host", HOST, "--port", str(port), "--analytics-off"]
    env = {"PREFECT_HOME": str(home), "PREFECT_UI_API_URL": f"http://{HOST}:{port}/api"}
    return LoopbackServer(
        name="Prefect server",
        port=port,
        command=python_command(*command),
        env=env | server_environment(auth, port),
        health="/api/health",
    )


def mlflow_server(folder: Path, port: int) -> LoopbackServer:
    """An MLflow server with its database and artifacts in `folder`."""
    from tasks.tracking.store import whole_store

    command = ["mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    command += ["--allowed-hosts", f"{HOST}:{port},localhost:{port}"]
    command += ["--backend-store-uri", whole_store(f"sqlite:///{folder / 'mlflow.db'}")]
    command += ["--artifacts-destination", str(folder / "mlartifacts")]
    # with job execution MLflow starts up to ten processes, which takes 30 s
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return LoopbackServer(name="MLflow server", port=port, command=python_command(*command), env=env, health="/health")


def client_environment(folder: Path, prefect: int, auth: str) -> dict[str, str]:
    """Variables by which other processes find the Prefect server. PREFECT_HOME replaces ~/.prefect."""
    from tasks.cluster.watchdog import HEARTBEAT_S

    return {
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": f"http://{HOST}:{prefect}/api",
        CLIENT_AUTH: auth,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
    }


def check_port(port: int, name: str) -> None:
    """Raise BadInput if a port of loopback is taken."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise BadInput(
            f"port {port} for the {name} server is not free ({os.strerror(error.errno or 0)}): is another one running "
            f"already? Stop it, or choose another port: make services ARGS='--{name} PORT'"
        ) from None


def main() -> int:
    """Run the servers until Ctrl-C or SIGTERM. Returns 0, or 2 if a port is taken, or 1 if one of them ends."""
    watch_lifeline()
    parser = argparse.ArgumentParser(description="Prefect server and MLflow server on loopback")
    parser.add_argument("--folder", type=Path, default=Path("runs/services"), help="keeps databases and logs")
    parser.add_argument("--prefect", type=int, default=4200, metavar="PORT", help="default: %(default)s")
    parser.add_argument("--mlflow", type=int, default=5000, metavar="PORT", help="default: %(default)s")
    given = parser.parse_args()
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    try:
        for name in ("prefect", "mlflow"):  # before anything is created in the folder
            check_port(getattr(given, name), name)
        _serve(given.folder.resolve(), given.prefect, given.mlflow, asked)
    except MetronomeError as error:
        log_error(f"error: {error}")
        return 2 if isinstance(error, BadInput) else 1
    finally:
        drop_lifeline()
    return 0


def _serve(folder: Path, prefect: int, mlflow: int, asked: threading.Event) -> None:
    print("starting ...", flush=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    auth = f"metronome:{secrets.token_hex(24)}"
    servers = [prefect_server(folder, prefect, auth), mlflow_server(folder, mlflow)]
    environment = client_environment(folder, prefect, auth)
    children = [Child(one.name, one.command, folder / f"{one.name.split()[0].lower()}.log", one.env) for one in servers]
    children.append(Child("watchdog", python_command("tasks.cluster.watchdog"), folder / "watchdog.log", environment))
    try:
        deadline = time.monotonic() + STARTUP_S
        while not all(one.answers() for one in servers) and not asked.is_set():
            _check(children)
            if time.monotonic() > deadline:
                raise DeadlineError(f"the servers were not ready after {STARTUP_S:.0f} s; their logs: {folder}")
            asked.wait(0.2)
        environment["MLFLOW_TRACKING_URI"] = servers[1].url
        _say(folder, servers, environment)
        while not asked.wait(1.0):
            _check(children)
    finally:
        stop_all(children[::-1], 8.0)


def _check(children: list[Child]) -> None:
    for child in children:
        child.check_alive()


def _say(folder: Path, servers: list[LoopbackServer], environment: Mapping[str, str]) -> None:
    """Write the file `ENV`, readable only by its owner, and say what it is for."""
    file = folder / ENV
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
        opened.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print("\n".join(f"{one.name:<15} {one.url}" for one in servers))
    print("watchdog        resumes crashed runs")
    print(f"\nCtrl-C ends them. In each other shell, first:\n\n. {shown}\n")
    print(f"Prefect's page asks for the user and password in {CLIENT_AUTH}, which that file sets.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
