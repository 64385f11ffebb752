"""A Prefect API server for the duration of one run: `python -m tasks.cluster.local_server FD` serves on an open socket.

Prefect's own ephemeral server is a plain subprocess that outlives a killed flow. This one has a lifeline and ends with
the flow.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import MetronomeError
from engine.run.logs import CleanFormatter
from engine.run.process import Child, python_command, watch_lifeline
from tasks.cluster.prefect_api import CLIENT_AUTH, server_environment

STARTUP_S = 180.0
"""Time limit of the start of servers in seconds; an idle machine takes 7 s, and 15 s the first time, when databases are
created."""
OWN: list[str] = []
"""URL of the server that this process has started, which no other run uses."""


@contextmanager
def local_server(output: Path) -> Iterator[Callable[[], None]]:
    """Start a server with its database in `<output>/prefect`, unless PREFECT_API_URL already names one. Yields a
    function that waits until it answers, and raises MetronomeError, with how the server ended, if it does not.

    Enter this before Prefect is imported, because Prefect reads its environment variables at import. The parent opens
    the socket, so the port is known, and a request that arrives before the start is complete waits in the backlog.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield lambda: None
        return
    home = (output / "prefect").resolve()
    home.mkdir(parents=True, exist_ok=True)
    os.environ["PREFECT_HOME"] = str(home)
    auth = f"run:{secrets.token_urlsafe(24)}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/api"
        environment = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"} | server_environment(auth, port)
        arguments = python_command("tasks.cluster.local_server", str(listener.fileno()))
        child = Child(
            name="Prefect server",
            arguments=arguments,
            log=home / "server.log",
            env=environment,
            pass_fds=[listener.fileno()],
        )
    os.environ |= {"PREFECT_API_URL": url, CLIENT_AUTH: auth}
    OWN.append(url)

    def wait() -> None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=STARTUP_S).close()
        except (urllib.error.URLError, OSError) as error:
            how = child.how_it_ended()
            raise MetronomeError(f"the local Prefect server does not answer ({error}); it {how}") from None

    try:
        yield wait
    finally:
        child.stop(grace_s=1.0)
        OWN.remove(url)
        del os.environ["PREFECT_API_URL"]
        del os.environ[CLIENT_AUTH]


def log_prefect_to(path: Path) -> None:
    """Send Prefect's log lines and tracebacks to a file, to keep the console for the run. Call after Prefect's
    import.
    """
    path.parent.mkdir(parents=True, exist_ok=True)  # a local server would have made it; of another one nobody has
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(CleanFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("prefect")
    logger.handlers = [handler]
    logger.propagate = False


def main() -> None:
    """Serve until the parent ends."""
    watch_lifeline()
    import uvicorn
    from prefect.server.api.server import create_app

    listener = socket.socket(fileno=int(sys.argv[1]))
    server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
