"""Requests to a Prefect server, which refuses those without its password."""

import base64
import json
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tasks.cluster import prefect_api

AUTH = "admin:its own"


class Prefect(BaseHTTPRequestHandler):
    """Answers what it was sent, to whoever has the password."""

    def do_POST(self):
        told = self.headers.get("Authorization", "")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        known = told == f"Basic {base64.b64encode(AUTH.encode()).decode()}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"method": self.command, "sent": body}).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def url():
    with HTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_requests_carry_the_password_of_the_environment(url, monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", AUTH)
    assert prefect_api.post_json(url, {"name": "night"}) == {"method": "POST", "sent": '{"name": "night"}'}
    for wrong in ("", "admin:another"):
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", wrong)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            prefect_api.post_json(url, {})


def test_a_password_that_is_given_counts_more_than_the_environments(url, monkeypatch):
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:another")
    assert prefect_api.post_json(url, {}, auth=AUTH)["method"] == "POST"


def test_a_server_on_this_machine_has_a_password_and_is_read_by_its_own_pages_only():
    assert prefect_api.server_environment(AUTH, 4200) == {
        "PREFECT_SERVER_API_AUTH_STRING": AUTH,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "http://127.0.0.1:4200,http://localhost:4200",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",
    }
