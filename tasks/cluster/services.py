"""Prefect server with its watchdog, MLflow server and an S3 endpoint on loopback, for development and tests:
`python -m tasks.cluster.services`.

    with Services(Path("runs/services")) as services:
        subprocess.run(command, env={**os.environ, **services.environment})

The S3 endpoint (moto) keeps its objects in memory and loses them when it ends. The other two keep their data in the
folder.
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
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from engine.errors import BadInput, DeadlineError, MetronomeError
from engine.run.guard import guarded_command
from engine.run.logs import log_error
from engine.run.process import Child, drop_lifeline, python_command, stop_all, watch_lifeline
from tasks.cluster.prefect_api import CLIENT_AUTH, post_json, server_environment

HOST = "127.0.0.1"
S3_KEY = "AWS_ACCESS_KEY_ID"
S3_SECRET = "s3.key"
"""File in the servers' folder with the access key of the S3 endpoint."""
BUCKET = "metronome"
"""Bucket that the S3 endpoint has from the start."""
PASSWORD = "prefect.password"
"""File in the servers' folder with the Prefect server's user and password."""
ENV = "env"
"""File in the servers' folder with the variables for other shells: `. runs/services/env`."""
PORTS = {"prefect": 4200, "mlflow": 5000, "s3": 9000}
"""Default ports of `make services`: the usual ports of these servers."""
STARTUP_S = 180.0
"""Time limit of the start in seconds. An idle machine needs 15 s for all three the first time, when databases are
created."""
STOP_S = 8.0
"""Seconds that servers have to end before they are killed."""
WORKER_GRACE_S = 5.0
"""Seconds of these that a worker gives its runs."""
PORT_S = 10.0
"""Seconds in which the port of a killed server must become free. The system may be slow to end the process and close
its socket."""
POLL_S = 0.2
HEARTBEAT_S = 30
"""PREFECT_FLOWS_HEARTBEAT_FREQUENCY of flow runs, by whose heartbeats tasks.cluster.watchdog detects silent flow runs.
The shortest value that Prefect allows; its default is 180. infra/pools and infra/compose also set it."""


class Service:
    """One server on its own port, or one process without a port. It can be killed and restarted."""

    def __init__(
        self, name: str, port: int, command: list[str], log: Path, env: Mapping[str, str], health: str = ""
    ) -> None:
        """`health`: path that answers 200 when the server is ready."""
        self.name = name
        self.port = port
        self.health = health
        self._command = command
        self._log = log
        self._env = dict(env)
        self.child: Child | None = None

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start or restart it; returns immediately. Raises BadInput if another process listens on its port."""
        if self.port:
            check_port(self.port, self.name, PORT_S if self.child is not None else 0.0)
        self.child = Child(self.name, guarded_command(self._command), self._log, self._env)

    def check(self) -> None:
        """Raise ProcessDied, with the end of its log, if the process has ended."""
        assert self.child is not None, f"{self.name} was not started"
        self.child.check_alive()

    def ready(self) -> bool:
        """Whether it answers. Raises ProcessDied if the process has ended."""
        self.check()
        try:
            urllib.request.urlopen(self.url + self.health, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return False
        return True

    def wait(self, timeout_s: float = STARTUP_S) -> None:
        """Wait until it answers. Raises ProcessDied with the end of its log, or DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the {self.name} was not ready after {timeout_s:.0f} s; its log: {self._log}")
            time.sleep(POLL_S)

    def stop(self, grace_s: float = STOP_S) -> None:
        """Send SIGTERM to all its processes, and SIGKILL after `grace_s` seconds."""
        if self.child is not None:
            self.child.stop(grace_s)

    def kill(self) -> None:
        """Send SIGKILL to all its processes immediately, as in a crash."""
        self.stop(0.0)


class Watchdog(Service):
    """`python -m tasks.cluster.watchdog` for the Prefect server. It is ready as soon as it runs."""

    def __init__(self, log: Path, env: Mapping[str, str]) -> None:
        """`env` must name the server (PREFECT_API_URL)."""
        super().__init__(name="watchdog", port=0, command=python_command("tasks.cluster.watchdog"), log=log, env=env)

    def ready(self) -> bool:
        """True. Raises ProcessDied if the process has ended."""
        self.check()
        return True


class Worker(Service):
    """`metronome worker` of a work pool. It is ready when the server lists it as online."""

    def __init__(self, pool: str, name: str, log: Path, env: Mapping[str, str], limit: int = 0) -> None:
        """`env` must name the server (PREFECT_API_URL). `limit`: maximum of concurrent flow runs, 0 for any number."""
        command = python_command("flows.cli", "worker")
        command += ["--pool", pool, "--name", name, "--limit", str(limit), "--grace", f"{WORKER_GRACE_S:g}"]
        super().__init__(name=f"worker {name} of pool {pool}", port=0, command=command, log=log, env=env)
        self._workers = f"{env['PREFECT_API_URL']}/work_pools/{pool}/workers/filter"
        self._auth = env.get(CLIENT_AUTH)
        self._worker_name = name

    def ready(self) -> bool:
        """Whether the server has received its heartbeat. Raises ProcessDied if the process has ended."""
        self.check()
        online = [one["name"] for one in post_json(self._workers, {}, self._auth) if one["status"] == "ONLINE"]
        return self._worker_name in online


class Services:
    """Starts the chosen servers, ends them together, and provides the environment variables by which others find
    them.
    """

    def __init__(self, folder: Path, prefect: int | None = 0, mlflow: int | None = 0, s3: int | None = 0) -> None:
        """`folder` holds databases and logs. Ports: 0 takes a free port, None leaves the server out."""
        self.folder = folder.resolve()
        asked = {"prefect": prefect, "mlflow": mlflow, "s3": s3}
        self.ports = {name: port or free_port() for name, port in asked.items() if port is not None}
        self.services: dict[str, Service] = {}
        self.environment = self._environment()
        """Variables by which other processes find the servers. PREFECT_HOME replaces ~/.prefect."""

    def __enter__(self) -> Services:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for name in self.ports:
                self.services[name] = getattr(self, f"_{name}")()
                self.services[name].start()
            for service in list(self.services.values()):
                service.wait()
            self.make_bucket()
            self._watch()
            self._write_environment()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    def worker(self, pool: str, name: str = "", env: Mapping[str, str] | None = None, limit: int = 0) -> Worker:
        """Start a process worker for an existing pool, and wait until it is online. Its flow runs also get `env`."""
        name = name or f"{pool}-{len(self.services)}"
        worker = Worker(
            pool=pool, name=name, log=self.folder / f"{name}.log", env={**self.environment, **(env or {})}, limit=limit
        )
        self.services[name] = worker
        worker.start()
        worker.wait()
        return worker

    def stop(self) -> None:
        """End everything that was started, including workers."""
        children = [service.child for service in self.services.values() if service.child is not None]
        stop_all(children[::-1], STOP_S)

    def make_bucket(self) -> None:
        """Create the bucket. Call it again after a restart of the S3 endpoint, which loses everything."""
        if "s3" in self.services:
            signed = f"AWS4-HMAC-SHA256 Credential={self.environment[S3_KEY]}/20260101/us-east-1/s3/aws4_request"
            headers = {"Authorization": f"{signed}, SignedHeaders=host, Signature=0"}  # moto checks none
            request = urllib.request.Request(f"{self.services['s3'].url}/{BUCKET}", headers=headers, method="PUT")
            urllib.request.urlopen(request, timeout=30).close()

    def _watch(self) -> None:
        """Start the watchdog if there is a Prefect server."""
        if "prefect" in self.services:
            self.services["watchdog"] = Watchdog(self.folder / "watchdog.log", self.environment)
            self.services["watchdog"].start()

    def _write_environment(self) -> None:
        """Write ENV, readable only by its owner; an earlier start may have had other ports."""
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in self.environment.items()]
        with open(os.open(self.folder / ENV, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.writelines(lines)

    def _environment(self) -> dict[str, str]:
        given = {"PREFECT_HOME": str(self.folder / "prefect")}
        if "prefect" in self.ports:
            given["PREFECT_API_URL"] = f"http://{HOST}:{self.ports['prefect']}/api"
            given[CLIENT_AUTH] = password_of(self.folder)
            given["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] = str(HEARTBEAT_S)
        if "mlflow" in self.ports:
            given["MLFLOW_TRACKING_URI"] = f"http://{HOST}:{self.ports['mlflow']}"
        if "s3" in self.ports:
            given |= {
                "AWS_ENDPOINT_URL": f"http://{HOST}:{self.ports['s3']}",
                S3_KEY: _kept_secret(self.folder / S3_SECRET),
                "AWS_SECRET_ACCESS_KEY": "unchecked-by-moto",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        return given

    def _prefect(self) -> Service:
        port = self.ports["prefect"]
        home = self.folder / "prefect"
        home.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            HOST,
            "--port",
            str(port),
            "--analytics-off",
        ]
        env = {"PREFECT_HOME": str(home), "PREFECT_UI_API_URL": self.environment["PREFECT_API_URL"]}
        env |= server_environment(self.environment[CLIENT_AUTH], port)
        return Service(
            name="Prefect server",
            port=port,
            command=command,
            log=self.folder / "prefect.log",
            env=env,
            health="/api/health",
        )

    def _mlflow(self) -> Service:
        from tasks.tracking.sqlite_store import whole_store  # takes seconds, during which the Prefect server starts

        port = self.ports["mlflow"]
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            HOST,
            "--port",
            str(port),
            "--workers",
            "1",
            "--app-name",
            "metronome",  # tasks.tracking.guarded_server
            "--backend-store-uri",
            whole_store(f"sqlite:///{self.folder / 'mlflow.db'}"),  # an earlier start may have been killed
            "--artifacts-destination",
            str(self.folder / "mlartifacts"),
        ]
        # with job execution MLflow starts up to ten processes, which takes 30 s
        env = {**self.environment, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        env.pop("MLFLOW_TRACKING_URI")
        return Service(
            name="MLflow server", port=port, command=command, log=self.folder / "mlflow.log", env=env, health="/health"
        )

    def _s3(self) -> Service:
        if find_spec("moto") is None:
            raise BadInput("the S3 endpoint is moto, which is not installed: pip install -e '.[dev]', or make services")
        command = python_command("tasks.cluster.s3_endpoint", str(self.ports["s3"]))
        return Service(
            name="S3 endpoint",
            port=self.ports["s3"],
            command=command,
            log=self.folder / "s3.log",
            env={S3_KEY: self.environment[S3_KEY]},
            health="/metronome-health",
        )


def free_port() -> int:
    """A port of loopback on which no process listens now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def check_port(port: int, name: str, within_s: float = 0.0, how: str = "") -> None:
    """Raise BadInput if a port of loopback is taken and does not become free within `within_s` seconds. `how`: how to
    choose another port."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return socket.create_server((HOST, port)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise BadInput(
                    f"port {port} for the {name} is not free ({os.strerror(error.errno or 0)}): is another one "
                    f"running already? Stop it, or choose another port{how}"
                ) from None
        time.sleep(POLL_S)


def password_of(folder: Path) -> str:
    """The Prefect server's "user:password", created at the first start and kept in the folder, readable only by its
    owner."""
    return _kept_secret(folder / PASSWORD, "metronome:")


def _kept_secret(file: Path, prefix: str = "") -> str:
    """Return the secret in a file that only its owner can read. It is made the first time, and begins with `prefix`."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(f"{prefix}{secrets.token_hex(24)}")
    return file.read_text().strip()


def main() -> int:
    """Run all three until Ctrl-C or SIGTERM. Returns 0, or 2 if a port is taken, or 1 if one of them ends."""
    watch_lifeline()
    parser = argparse.ArgumentParser(description="Prefect server, MLflow server and an S3 endpoint on loopback")
    parser.add_argument("--folder", type=Path, default=Path("runs/services"), help="keeps databases and logs")
    for name, port in PORTS.items():
        parser.add_argument(f"--{name}", type=int, default=port, metavar="PORT", help="default: %(default)s")
    arguments = vars(parser.parse_args())
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    try:
        for name in PORTS:  # before anything is created in the folder
            check_port(arguments[name], f"{name} server", how=f": make services ARGS='--{name} PORT'")
        _serve(Services(**arguments), asked)
    except MetronomeError as error:
        log_error(f"error: {error}")
        return 2 if isinstance(error, BadInput) else 1
    finally:
        drop_lifeline()
    return 0


def _serve(services: Services, asked: threading.Event) -> None:
    print("starting ...", flush=True)
    with services:
        print(
            "\n".join(
                f"{one.name:<15} {one.url if one.port else 'resumes crashed runs'}"
                for one in services.services.values()
            )
        )
        file = services.folder / ENV
        shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
        print(f"\nCtrl-C ends them. In each other shell, first:\n\n. {shown}\n")
        print(f"Prefect's page asks for the user and password in {CLIENT_AUTH}, which that file sets.", flush=True)
        while not asked.wait(1.0):
            for service in services.services.values():
                service.check()


if __name__ == "__main__":
    sys.exit(main())
