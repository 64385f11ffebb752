"""Requests to a Prefect server, which refuses those without its password."""

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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        known = self.headers.get("Authorization", "") == "Basic YWRtaW46aXRzIG93bg=="
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"sent": body}).encode())

    def log_message(self, *arguments):
        pass


def test_requests_carry_the_password_that_is_given_or_else_that_of_the_environment(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Prefect) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        for there, given in ((AUTH, None), ("admin:another", AUTH)):
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", there)
            assert prefect_api.post_json(url, {"name": "night"}, auth=given) == {"sent": '{"name": "night"}'}
        for wrong in ("", "admin:another"):
            monkeypatch.setenv("PREFECT_API_AUTH_STRING", wrong)
            with pytest.raises(urllib.error.HTTPError, match="401"):
                prefect_api.post_json(url, {})
        server.shutdown()


def test_a_server_on_this_machine_has_a_password_and_is_read_by_its_own_pages_only():
    assert prefect_api.server_environment(AUTH, 4200) == {
        "PREFECT_SERVER_API_AUTH_STRING": AUTH,
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "http://127.0.0.1:4200,http://localhost:4200",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,orphans",
    }
