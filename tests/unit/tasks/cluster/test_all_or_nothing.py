"""How a deploy that fails ends, with a server of which only a client with the user's headers gets answers;
tests/stack/test_refused_requests.py has a real one."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from prefect import __version__
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_CUSTOM_HEADERS,
    temporary_settings,
)

from engine.errors import MetronomeError
from tasks.cluster import all_or_nothing as module
from tasks.cluster.all_or_nothing import Touched, all_or_nothing

NOTHING = Touched(pools=[], limits=[], deployments=[], queues=[], automations=[], blocks=[])
HEADERS = {"X-Gate": "open"}
BACK = "Nothing is changed: the server has again what it had before."


class Gate(BaseHTTPRequestHandler):
    """A server that has nothing, behind a proxy that wants a header."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        right = self.headers.get("X-Gate") == "open"
        text = json.dumps(__version__ if "version" in self.path else []).encode() if right else b"{}"
        self.send_response(200 if right else 403)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, *given):
        pass


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(module, "BACK_S", 0.5)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    own = {PREFECT_API_URL: url, PREFECT_CLIENT_CUSTOM_HEADERS: HEADERS, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED: False}
    with temporary_settings(own):
        yield
    server.shutdown()
    server.server_close()


def test_a_server_is_asked_as_prefects_own_client_asks_it(gate):
    assert module._answers()
    with temporary_settings({PREFECT_CLIENT_CUSTOM_HEADERS: {"X-Gate": "shut"}}):
        assert not module._answers()


def test_a_failure_says_that_nothing_is_changed(gate):
    with pytest.raises(MetronomeError, match=rf"^refused\s+{BACK}$"), all_or_nothing(NOTHING):
        raise ValueError("refused")


def test_an_interruption_stays_one_once_all_is_put_back(gate, capsys):
    with pytest.raises(KeyboardInterrupt), all_or_nothing(NOTHING):
        raise KeyboardInterrupt
    assert BACK in capsys.readouterr().out


def test_a_server_that_does_not_tell_what_it_has_is_left_alone(gate):
    begun = []
    with (
        temporary_settings({PREFECT_CLIENT_CUSTOM_HEADERS: {"X-Gate": "shut"}}),
        pytest.raises(MetronomeError, match="nothing is changed, since the Prefect server does not tell .*403"),
        all_or_nothing(NOTHING),
    ):
        begun.append(1)
    assert begun == []
