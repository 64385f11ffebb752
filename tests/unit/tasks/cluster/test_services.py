"""Ports and ends of development servers; the servers themselves run in tests/stack."""

import http.server
import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import psutil
import pytest

from engine.errors import BadInput, ProcessDied
from engine.run.guard import guarded_command
from support.runs import ROOT, wait_for
from tasks.cluster.services import PASSWORD, Service, Services, Watchdog, check_port, free_port, password_of

SERVE = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port} for the S3 endpoint is not free"):
            check_port(port, "S3 endpoint")
        command = [
            sys.executable,
            "-m",
            "tasks.cluster.services",
            "--folder",
            str(tmp_path / "none"),
            "--mlflow",
            str(port),
        ]
        others = ["--prefect", str(free_port()), "--s3", str(free_port())]
        done = subprocess.run([*command, *others], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: port {port} for the mlflow server is not free")
    assert not (tmp_path / "none").exists()


def test_the_environment_names_only_what_is_asked_for(tmp_path):
    found = Services(tmp_path, mlflow=None, s3=None).environment
    assert set(found) == {
        "PREFECT_HOME",
        "PREFECT_API_URL",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY",
    }


def test_a_password_is_made_once_and_only_its_owner_reads_it(tmp_path):
    before = os.umask(0)
    try:
        made = password_of(tmp_path / "one")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "one" / PASSWORD).stat().st_mode) == 0o600
    assert password_of(tmp_path / "one") == made != password_of(tmp_path / "two")


def test_a_killed_service_comes_back_on_its_port(tmp_path):
    port = free_port()
    service = Service(
        name="file server", port=port, command=[*SERVE, str(port)], log=tmp_path / "log", env={}, health="/"
    )
    try:
        service.start()
        service.wait(30)
        [program] = psutil.Process(service.child.pid).children()
        program.kill()
        service.child.process.wait(10)
        with pytest.raises(ProcessDied, match="file server was ended by SIGKILL"):
            service.check()
        service.start()
        service.wait(30)
    finally:
        service.stop()
    check_port(port, "next one", within_s=5)


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


def test_a_watchdog_outlasts_a_page_in_place_of_an_answer(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dog = Watchdog(tmp_path / "log", {"PREFECT_API_URL": f"http://127.0.0.1:{server.server_port}/api"})
    try:
        dog.start()
        wait_for(lambda: "JSONDecodeError" in (tmp_path / "log").read_text(), "the watchdog's first look")
        assert "does not answer as it should: JSONDecodeError" in (tmp_path / "log").read_text()
        assert dog.ready()
    finally:
        dog.stop()
        server.shutdown()
        server.server_close()


def test_a_watchdog_waits_for_a_server_that_is_not_there_yet(tmp_path):
    dog = Watchdog(tmp_path / "log", {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api"})
    try:
        dog.start()
        wait_for(lambda: "does not answer" in (tmp_path / "log").read_text(), "the watchdog's first look")
        assert dog.ready()
    finally:
        dog.stop()
    with pytest.raises(ProcessDied, match="watchdog"):
        dog.check()


def test_a_guarded_program_ends_with_its_parent(tmp_path):
    sleeper = guarded_command([sys.executable, "-c", "import time; time.sleep(600)"])
    code = (
        "from engine.run.process import Child; import time; "
        f"print(Child('x', {sleeper!r}).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        guard = psutil.Process(int(parent.stdout.readline()))
        wait_for(guard.children, "the guarded program")
        [program] = guard.children()
        os.kill(parent.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([guard, program], timeout=10)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        parent.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("code", "status"),
    [("raise SystemExit(7)", 7), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
)
def test_a_guard_ends_as_its_program_did(code, status):
    assert subprocess.run(guarded_command([sys.executable, "-c", code]), cwd=ROOT, timeout=30).returncode == status
