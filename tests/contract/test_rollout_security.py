"""Token, limits and malformed requests of a rollout instance: one real server process of each engine."""

import json
import time

import pytest

from support import fuzz_routes
from support.fuzz_requests import ROUTES, cut_off, odd_http, request_bytes, table, well_formed
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
    [
        [],
        [("Authorization", "")],
        [("Authorization", TOKEN)],
        [("Authorization", f"Bearer {TOKEN}x")],
        [("Authorization", "Bearer ")],
        [("Authorization", f"Bearer {TOKEN[:-1]}")],
        [("Authorization", f"Basic {TOKEN}")],
        [("Authorization", "Bearer \udcff\udc80")],
        [("Authorization", f"Bearer {TOKEN}")] * 2,
        [("Cookie", f"token={TOKEN}")],
    ],
)
def test_without_the_token_nothing_is_done(server, headers):
    before = server.call("GET", "/load")
    for route in (*ROUTES, "/nowhere"):
        if route != "/health":
            for method in ("GET", "POST"):
                status, reply = server.send(request(route, GOOD, headers, method))
                assert status == 401, (method, route)
                assert json.loads(reply)["error"]["type"] == "UnauthorizedError"
    assert server.send(request("/health", GOOD, headers))[0] == 401  # only GET is free
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


def test_health_needs_no_token_and_the_scheme_no_case(server):
    assert server.send(request("/health", b"", method="GET"))[0] == 200
    assert server.send(request("/v1/completions", GOOD, [("Authorization", f"bearer {TOKEN}")]))[0] == 200


def test_no_token_is_asked_for_before_the_body(server):
    # the announced body never comes
    assert server.send(request("/update_weights", b"", length=2**20))[0] == 401


@pytest.mark.parametrize(
    ("route", "limit"),
    [
        ("/v1/completions", 2**16 + 16 * (CONTEXT + 64)),
        ("/update_weights", 2**24),
        ("/pause", 2**16),
        ("/finish_weight_update", 2**16),
    ],
)
def test_large_bodies_are_413(server, route, limit):
    headers = server.authorization()
    status, reply = server.send(request(route, b"", headers, length=limit + 1))
    assert status == 413
    assert f"at most {limit} bytes" in json.loads(reply)["error"]["message"]
    if limit < 2**20:
        chunked = [
            f"POST {route} HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            *(": ".join(header) for header in headers),
            "Transfer-Encoding: chunked",
            "",
            f"{limit + 1:x}",
            " " * (limit + 1),
            "0",
            "",
            "",
        ]
        assert server.send("\r\n".join(chunked).encode())[0] == 413


def test_the_longest_prompt_is_no_large_body(server):
    body = {"prompt": [63] * (CONTEXT - 1), "max_tokens": 1, "stop_token_ids": list(range(64))}
    assert (
        server.send(request("/v1/completions", json.dumps(body, indent=8).encode(), server.authorization()))[0] == 200
    )


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


def test_requests_with_odd_headers_are_no_fault_and_have_no_effect(server):
    fuzz_routes.fuzz(server, 100, odd_http(server))


def test_requests_that_end_early_are_no_fault_and_have_no_effect(server):
    fuzz_routes.fuzz(server, 100, cut_off(server), end=True)


def test_bad_updates_leave_the_weights_and_the_way_to_good_ones(server):
    fuzz_routes.fuzz_update(server, 60)
