"""`make services` and the watchdog as processes; tests/stack has the servers."""

import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from engine.run.process import LIFELINE, hold_lifeline
from support.ports import free_port
from support.runs import ROOT, wait_for

SERVICES = [sys.executable, "-m", "tasks.cluster.services"]


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = ["--prefect", str(free_port()), "--mlflow", str(port)]
        done = subprocess.run(
            [*SERVICES, "--folder", str(tmp_path / "none"), *ports],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: port {port} for the mlflow server is not free")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_servers_run_until_they_are_asked_to_end(tmp_path):
    ports = ["--prefect", str(free_port()), "--mlflow", str(free_port())]
    process = subprocess.Popen(
        [*SERVICES, "--folder", str(tmp_path), *ports], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        said = ""
        while "Prefect's page asks" not in said:
            said += (line := process.stdout.readline())
            assert line, said
        for name in ("Prefect server", "MLflow server", "watchdog"):
            assert name in said
        file = tmp_path / "env"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert f"http://127.0.0.1:{ports[1]}/api" in file.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for port in ports[1::2]:
            socket.create_server(("127.0.0.1", int(port))).close()
    finally:
        process.kill()
        process.wait()


class Page(http.server.BaseHTTPRequestHandler):
    """Answers every request as a proxy does whose server is away: with a page, and as if all were well."""

    def answer(self):
        page = b"<html>We will be back soon.</html>"
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


@contextmanager
def page():
    """The port of a server that answers with a page."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def nobody():
    yield free_port()


@pytest.mark.parametrize(("there", "reason"), [(page, "JSONDecodeError"), (nobody, "ConnectError")])
def test_a_watchdog_outlasts_a_server_that_does_not_answer_as_it_should(tmp_path, there, reason):
    log = tmp_path / "log"
    alive = tmp_path / "alive"
    with there() as port, log.open("w") as output:
        environment = os.environ | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", LIFELINE: hold_lifeline()}
        command = [sys.executable, "-m", "tasks.cluster.watchdog", "--every", "0.1", "--alive", str(alive)]
        dog = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output)
        try:
            wait_for(lambda: log.read_text().count(reason) > 1, "the watchdog's second look", 60)
            assert "does not answer as it should" in log.read_text()
            assert alive.exists()
            assert dog.poll() is None
        finally:
            dog.kill()
            dog.wait()
