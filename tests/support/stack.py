"""Servers that live through a test, or are killed and started again by it: Prefect with its watchdog, MLflow, an S3
endpoint (moto, which keeps its objects in memory), and Prefect's workers.

    with Services(folder) as services:
        subprocess.run(command, env={**os.environ, **services.environment})
"""

import sys
import time
import urllib.request
from contextlib import suppress

from engine.errors import DeadlineError
from engine.run.process import Child, python_command, stop_all
from support.guard import guarded_command
from support.ports import free_port
from tasks.cluster.local_server import STARTUP_S
from tasks.cluster.prefect_api import CLIENT_AUTH, post_json
from tasks.cluster.services import HOST, LoopbackServer, client_environment, mlflow_server, prefect_server

BUCKET = "metronome"
"""Bucket that the S3 endpoint has from the start."""
PREFECT = [sys.executable, "-m", "prefect"]
AUTH = "metronome:sentinel-of-prefect"
STOP_S = 8.0
POLL_S = 0.2
QUICKLY = ("--every", "5", "--after", "20")
"""How the watchdog looks here. A worker reports a death twice, up to 15 s apart."""


class Service:
    """One process that can be killed and restarted."""

    def __init__(self, name, command, log, env, ready=lambda: True, url=""):
        self.name = name
        self.url = url
        self.child = None
        self._start = lambda: Child(name, guarded_command(command), log, env)
        self._ready = ready

    def start(self):
        """Start or restart it; returns immediately."""
        self.child = self._start()

    def ready(self):
        """Whether it answers. Raises ProcessDied, with the end of its log, if the process has ended."""
        self.child.check_alive()
        return self._ready()

    def wait(self, timeout_s=STARTUP_S):
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the {self.name} was not ready after {timeout_s:.0f} s; its log: {self.child.log}")
            time.sleep(POLL_S)

    def stop(self, grace_s=STOP_S):
        """Send SIGTERM to all its processes, and SIGKILL after `grace_s` seconds."""
        if self.child is not None:
            self.child.stop(grace_s)

    def kill(self):
        """Send SIGKILL to all its processes immediately, as in a crash."""
        self.stop(0.0)


class Services:
    """Starts the chosen servers and ends them together."""

    def __init__(self, folder, *, prefect=True, mlflow=True, s3=True, watchdog=QUICKLY):
        """`folder` holds databases and logs. `watchdog`: its arguments."""
        self.folder = folder.resolve()
        self.services = {}
        self.environment = {"PREFECT_HOME": str(self.folder / "prefect")}
        """Variables by which other processes find the servers."""
        self._servers = {}
        self._watchdog = watchdog
        if prefect:
            self._servers["prefect"] = prefect_server(self.folder, free_port(), AUTH)
            self.environment |= client_environment(self.folder, self._servers["prefect"].port, AUTH)
        if mlflow:
            self._servers["mlflow"] = mlflow_server(self.folder, free_port())
            self.environment["MLFLOW_TRACKING_URI"] = self._servers["mlflow"].url
        if s3:
            self._servers["s3"] = s3_endpoint(free_port())
            self.environment |= {
                "AWS_ENDPOINT_URL": self._servers["s3"].url,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "unchecked-by-moto",
                "AWS_DEFAULT_REGION": "us-east-1",
            }

    def __enter__(self):
        try:
            for name, server in self._servers.items():
                log = self.folder / f"{name}.log"
                self.services[name] = Service(
                    name=server.name,
                    command=server.command,
                    log=log,
                    env=server.env,
                    ready=server.answers,
                    url=server.url,
                )
                self.services[name].start()
            for service in list(self.services.values()):
                service.wait()
            self.make_bucket()
            if "prefect" in self._servers:
                command = python_command("tasks.cluster.watchdog", *self._watchdog)
                dog = Service("watchdog", command, self.folder / "watchdog.log", self.environment)
                self.services["watchdog"] = dog
                dog.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def __getitem__(self, name):
        return self.services[name]

    def worker(self, pool, name="", env=None, limit=0):
        """Start a process worker for an existing pool, and wait until it is online. Its flow runs also get `env`."""
        name = name or f"{pool}-{len(self.services)}"
        command = [*PREFECT, "worker", "start", "--pool", pool, "--name", name]
        command += ["--limit", str(limit)] if limit else []
        workers = f"{self.environment['PREFECT_API_URL']}/work_pools/{pool}/workers/filter"

        def online():
            with suppress(OSError):
                found = post_json(workers, {}, self.environment[CLIENT_AUTH])
                return name in [one["name"] for one in found if one["status"] == "ONLINE"]
            return False

        worker = Service(
            name=f"worker {name} of pool {pool}",
            command=command,
            log=self.folder / f"{name}.log",
            env={**self.environment, **(env or {})},
            ready=online,
        )
        self.services[name] = worker
        worker.start()
        worker.wait()
        return worker

    def stop(self):
        """End everything that was started, including workers."""
        children = [service.child for service in self.services.values() if service.child is not None]
        stop_all(children[::-1], STOP_S)

    def make_bucket(self):
        """Create the bucket. Call it again after a restart of the S3 endpoint, which loses everything."""
        if "s3" in self.services:
            request = urllib.request.Request(f"{self.services['s3'].url}/{BUCKET}", method="PUT")
            urllib.request.urlopen(request, timeout=30).close()


def s3_endpoint(port):
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
    return LoopbackServer(name="S3 endpoint", port=port, command=command, env={}, health="/moto-api/")
