"""Token, limits and malformed requests of a rollout instance: one real server process of each engine."""

import json
import time

import pytest

from support import fuzz_routes
from support.fuzz_requests import ROUTES, request_bytes, table, well_formed
from support.served import CONTEXT, ENGINES, PROMPT, save_model, serving

TOKEN = "a-secret"
OPEN = 6
READ_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module", params=ENGINES)
def server(request, model, tmp_path_factory):
    limits = ("--open-requests", str(OPEN), "--read-timeout", str(int(READ_S)))
    folder = tmp_path_factory.mktemp("server")
    with serving(model, folder, *limits, token=TOKEN, engine=request.param) as (process, ready):
        server = fuzz_routes.Server(ready["host"], ready["port"], TOKEN, prompt=tuple(PROMPT))
        server.begin()
        yield server
        assert process.poll() is None


@pytest.fixture(autouse=True)
def _unchanged(server):
    yield
    assert server.state() == server.reference


def request(route, body=b"{}", headers=(), method="POST", **more):
    return request_bytes(method, route, body, headers, **more)


GOOD = json.dumps({"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}).encode()


@pytest.mark.parametrize(
    "headers",
    [[], [("Authorization", f"Bearer {TOKEN}x")], [("Authorization", f"Bearer {TOKEN}")] * 2],
)
def test_without_the_token_nothing_is_done(server, headers):
    """Every other header: tests/unit/wire/test_access_token.py."""
    before = server.call("GET", "/load")
    for route in (*ROUTES, "/nowhere"):
        for method in {"GET", "POST"} - ({"GET"} if route == "/health" else set()):
            status, reply = server.send(request(route, GOOD, headers, method))
            assert status == 401, (method, route)
            assert json.loads(reply)["error"]["type"] == "UnauthorizedError"
    assert server.call("GET", "/load") == before


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("Host", "evil.example", 403),
        ("Origin", "http://evil.example", 403),
        ("Sec-Fetch-Site", "same-site", 403),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Content-Encoding", "gzip", 415),
    ],
)
def test_no_request_of_a_web_page_is_taken_even_with_the_token(server, name, value, expected):
    for route in ("/pause", "/begin_weight_update", "/v1/completions", "/health"):
        good = request(route, GOOD, server.authorization(), "GET" if route == "/health" else "POST").decode()
        host = "Host: localhost\r\n"
        page = f"{name}: {value}\r\n"
        sent = good.replace(host, page if name == "Host" else host + page)
        assert sent != good
        assert server.send(sent.encode())[0] == expected, route


def test_no_token_is_asked_for_before_the_body(server):
    # the announced body never comes
    assert server.send(request("/update_weights", b"", length=2**20))[0] == 401


@pytest.mark.parametrize(("route", "limit"), [("/v1/completions", 2**16 + 16 * (CONTEXT + 64)), ("/pause", 2**16)])
def test_large_bodies_of_unknown_size_are_413(server, route, limit):
    """Those that say their size: the rule `limits` of `metronome conform`."""
    head = request(route, b"", [*server.authorization(), ("Transfer-Encoding", "chunked")])
    head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length"))
    status, reply = server.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (limit + 1, b" " * (limit + 1)))
    assert status == 413
    assert f"at most {limit} bytes" in json.loads(reply)["error"]["message"]


def test_a_slow_body_is_waited_for_and_a_stalled_one_is_408(server):
    good = request("/v1/completions", GOOD, server.authorization())
    assert server.send(good, pause_s=READ_S / 8)[0] == 200
    started = time.monotonic()
    assert server.send(request("/v1/completions", GOOD[:20], server.authorization(), length=len(GOOD)))[0] == 408
    assert READ_S * 0.9 < time.monotonic() - started < READ_S + 10


def test_more_open_completions_than_allowed_are_429(server):
    assert server.call("POST", "/pause?mode=wait")[0] == 200
    good = request("/v1/completions", GOOD, server.authorization())
    waiting = [server.connect() for _ in range(OPEN)]
    try:
        for connection in waiting:
            connection.sendall(good)
        server.until(lambda load: load["waiting"] == OPEN)
        status, reply = server.send(good)
        assert (status, json.loads(reply)["error"]["type"]) == (429, "TooManyRequestsError")
        assert json.loads(server.call("GET", "/load")[1])["waiting"] == OPEN
    finally:
        for connection in waiting:
            connection.close()
    server.until(lambda load: load["waiting"] == 0)
    assert server.call("POST", "/resume")[0] == 200
    assert server.send(good)[0] == 200


def test_every_odd_value_method_and_path_is_no_fault_and_has_no_effect(server):
    server.check_all(table(server))


def test_requests_of_any_content_are_no_fault_and_have_no_effect(server):
    fuzz_routes.fuzz(server, 200, well_formed(server))


def test_bad_updates_leave_the_weights_and_the_way_to_good_ones(server):
    fuzz_routes.fuzz_update(server, 60)
