"""The orchestrator's server: who may join, leave and ask, what is refused without effect, what is shown."""

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import Config
from engine.errors import BadInput, ProcessDied
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.server import Server, check_addresses, listen_address
from engine.run import limits
from engine.wire.access_token import authorization_headers
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.scripted import Scripted, until

SPOKEN = {"protocol": ROLLOUT_PROTOCOL}


def joining(url, name="guest"):
    """The request of an instance that joins."""
    return SPOKEN | {"name": name, "url": url}


GOOD = joining("http://127.0.0.1:4711")


@contextlib.asynccontextmanager
async def running(folder, taken=True, **rollout):
    """(pool, server, call): `call` sends a request to a server that really listens."""
    config = Config(rollout={"heartbeat_s": 5, "wait_s": 20, "instances": 0, **rollout})
    pool = Pool(config, folder, folder)
    server = Server(config)
    if taken:
        server.serve_pool(pool)
    await pool.connect_instances()
    try:
        async with HealthMonitor(pool), server.listening(folder) as address, aiohttp.ClientSession() as session:
            assert (folder / "rollout.address").read_text() == f"{address}\n"
            base = f"http://{address}"

            async def call(method, route, body=None, headers=None, raw=False, **more):
                sent = authorization_headers(server.key) if headers is None else headers
                async with session.request(method, base + route, json=body, headers=sent, **more) as answer:
                    return answer.status, await (answer.text() if raw or route == "/metrics" else answer.json())

            yield pool, server, call
    finally:
        await pool.close()
    assert not (folder / "rollout.address").exists()


@contextlib.asynccontextmanager
async def joined(folder, instance=None, **rollout):
    """(pool, server, call, url) with an instance that has joined and serves."""
    async with running(folder, **rollout) as (pool, server, call), (instance or Scripted()).serving() as url:
        assert (await call("POST", "/join", joining(url)))[0] == 200
        await until(lambda: pool.serving == 1 and pool.instances[0].load is not None, "it")
        yield pool, server, call, url


async def test_an_instance_joins_serves_leaves_and_is_not_taken_in_again_by_itself(tmp_path):
    async with joined(tmp_path) as (pool, _, call, url):
        assert await call("POST", "/join", joining(url) | {"again": True}) == (200, {"state": "serving"})
        assert len(pool.instances) == 1
        async with pool.borrow():  # it finishes what it has
            assert await call("POST", "/leave", {"name": "guest"}) == (200, {"state": "draining"})
            assert (await call("POST", "/join", joining(url)))[0] == 410
            assert (await call("GET", "/status"))[1]["instances"][0]["state"] == "draining"
        assert (await call("GET", "/status"))[1]["instances"] == []
        assert (await call("POST", "/join", joining(url) | {"again": True}))[0] == 410
        assert (await call("POST", "/join", joining(url)))[0] == 200  # by hand, it may
        await until(lambda: pool.serving == 1, "it")
        assert await call("POST", "/leave", {"name": "guest"}) == (200, {"state": "gone"})


async def test_a_name_belongs_to_one_living_instance(tmp_path):
    async with running(tmp_path, heartbeat_s=0.1) as (pool, _, call), Scripted().serving() as other:
        first = Scripted()
        async with first.serving() as url:
            await call("POST", "/join", joining(url))
            status, reply = await call("POST", "/join", joining(other))
            assert (status, url in reply["error"]["message"]) == (409, True)
        await until(lambda: pool.find_instance("guest").state == "out", "its silence")
        assert (await call("POST", "/join", joining(other)))[0] == 200
        await until(lambda: pool.serving == 1, "the new one")
        assert [one.client.url for one in pool.instances] == [other]


URLS = (
    "",
    7,
    "127.0.0.1:4711",
    "https://127.0.0.1:4711",
    "http://127.0.0.1",
    "http://127.0.0.1:x",
    "http://127.0.0.1:4711/",
    "http://u:p@127.0.0.1:4711",
    "http://10.0.0.1:4711",
    "http://example.com:80",
    "http://127.0.0.1:99999",
    "http://[::1:4711",
)
NAMES = ("", "../x", 7, "a" * 101)
BAD = [
    {},
    SPOKEN | {"name": "guest"},
    SPOKEN | {"url": GOOD["url"]},
    GOOD | {"again": "yes"},
    *(GOOD | {"name": name} for name in NAMES),
    *(GOOD | {"url": url} for url in URLS),
]


async def test_malformed_requests_are_refused_without_effect(tmp_path):
    async with running(tmp_path) as (pool, _, call):
        for body in BAD:
            status, reply = await call("POST", "/join", body)
            assert status == 400, (body, reply)
        for raw in (b"", b"{", b"[]", b"\xff", b"[" * 5000):
            assert (await call("POST", "/join", data=raw))[0] == 400
            assert (await call("POST", "/leave", data=raw))[0] == 400
        assert (await call("POST", "/leave", {"name": "nobody"}))[0] == 404
        assert (await call("POST", "/join", GOOD | {"padding": "x" * 100_000}))[0] == 413
        assert (await call("POST", "/join", data=pieces(json.dumps(GOOD).encode())))[0] == 411
        assert (await call("GET", "/nothing"))[0] == 404
        assert (await call("GET", "/join"))[0] == 405
        assert pool.instances == []


async def pieces(body):
    for at in range(0, len(body), 30):
        yield body[at : at + 30]
        await asyncio.sleep(0.02)


async def test_a_request_may_arrive_in_pieces(tmp_path):
    async with running(tmp_path) as (pool, server, call):
        for route, left in (("/join", 1), ("/leave", 0)):
            body = json.dumps(GOOD).encode()
            sent = authorization_headers(server.key) | {"Content-Length": str(len(body))}
            assert (await call("POST", route, data=pieces(body), headers=sent))[0] == 200
            assert len(pool.instances) == left


@pytest.mark.parametrize(
    "version", [None, 0, ROLLOUT_PROTOCOL + 1, str(ROLLOUT_PROTOCOL), float(ROLLOUT_PROTOCOL), True]
)
async def test_an_instance_of_another_protocol_is_refused_by_name(tmp_path, version):
    async with running(tmp_path) as (pool, _, call):
        body = GOOD | {"protocol": version} if version is not None else {"name": "guest", "url": GOOD["url"]}
        status, reply = await call("POST", "/join", body)
        said = "does not say its version" if version is None else f"speaks version {version!r}"
        message = reply["error"]["message"]
        assert status == 400
        assert said in message
        assert f"this orchestrator speaks {ROLLOUT_PROTOCOL}; start the instance with the release" in message
        assert pool.instances == []


class Asked(Scripted):
    """Notes with which tokens it is asked."""

    def __init__(self):
        super().__init__()
        self.seen = []

    async def load(self, request):
        self.seen.append(request.headers.get("Authorization"))
        return await super().load(request)


ROUTES = [("POST", "/join"), ("POST", "/leave"), ("GET", "/status"), ("GET", "/metrics"), ("GET", "/none")]


@pytest.mark.parametrize("token", ["secret", None])
async def test_the_token_is_demanded_on_every_route_and_sent_to_instances(tmp_path, monkeypatch, token):
    """On loopback too: without METRONOME_TOKEN it is that of the run."""
    monkeypatch.delenv("METRONOME_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("METRONOME_TOKEN", token)
    instance = Asked()
    async with running(tmp_path, heartbeat_s=0.1) as (pool, server, call), instance.serving() as url:
        assert token in (None, server.key)
        for headers in ({}, authorization_headers("secre"), {"Authorization": server.key}):
            for method, route in ROUTES:
                assert (await call(method, route, GOOD, headers=headers, raw=True))[0] == 401
        assert pool.instances == []
        guest = joining(url)
        assert (await call("POST", "/join", guest))[0] == 200
        await until(lambda: set(instance.seen) == {f"Bearer {server.key}"}, "a heartbeat")
        assert (await call("POST", "/join", guest | {"token": "its own", "again": True}))[0] == 200
        await until(lambda: instance.seen[-1] == "Bearer its own", "its token, after a restart at the same port")
        assert (await call("POST", "/join", guest | {"token": "line\nend"}))[0] == 400
        elsewhere = await call("POST", "/join", SPOKEN | {"name": "far", "url": "http://10.255.0.1:9"})
        assert elsewhere[0] == (200 if token else 400)


STRANGERS = [
    ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example:8000"}, 403),
    ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://127.0.0.1:8000"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Content-Encoding": "gzip"}, 415),
]
"""Headers of a page's requests and of compressed bodies, and how they are answered, also with the token."""


async def test_no_request_of_a_web_page_is_taken_even_with_the_token(tmp_path):
    async with joined(tmp_path) as (pool, server, call, _):
        for headers, expected in STRANGERS:
            for given in (headers, headers | authorization_headers(server.key)):
                for method, route, body in (("POST", "/leave", {"name": "guest"}), ("GET", "/status", None)):
                    assert (await call(method, route, body, headers=given))[0] == expected
        assert [one.state for one in pool.instances] == ["serving"]


def test_listening_off_loopback_needs_the_token(monkeypatch):
    monkeypatch.delenv("METRONOME_TOKEN", raising=False)
    assert listen_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert listen_address("[::1]:0") == ("::1", 0)
    with pytest.raises(BadInput, match=r"rollout\.listen 0\.0\.0\.0.*METRONOME_TOKEN"):
        listen_address("0.0.0.0:80")
    for wrong in ("", "127.0.0.1", ":80", "127.0.0.1:http", "127.0.0.1:99999", "somewhere:80"):
        with pytest.raises(BadInput, match=r"rollout\.listen"):
            listen_address(wrong)
    monkeypatch.setenv("METRONOME_TOKEN", "secret")
    assert listen_address("0.0.0.0:80") == ("0.0.0.0", 80)


NODES = {"nodes": 2, "data": 2}


@pytest.mark.parametrize(
    ("listen", "rendezvous", "said"),
    [
        ("auto:0", "", ""),
        ("auto:TAKEN", "", "rollout.listen = 'auto:TAKEN': Address already in use"),
        ("192.0.2.1:0", "", "rollout.listen = '192.0.2.1:0': Cannot assign requested address"),
        ("auto:0", "auto:29500", ""),
        ("auto:0", "auto:BEFORE", "parallel.rendezvous = 'auto:BEFORE': Address already in use"),
        ("auto:0", "train-0.invalid:29500", "parallel.rendezvous = 'train-0.invalid:29500': .*an address of this"),
        ("auto:0", "192.0.2.1:29500", "parallel.rendezvous = '192.0.2.1:29500': Cannot assign requested address"),
        ("auto:0", "auto", "parallel.rendezvous = 'auto': expected host:port"),
    ],
)
def test_an_address_that_the_run_can_not_have_is_refused_before_it_starts(monkeypatch, listen, rendezvous, said):
    """Here and in a dry run, which may be beside another run with the same ports. The nodes also meet at the port
    after the rendezvous's."""
    monkeypatch.setenv("METRONOME_TOKEN", "secret")
    monkeypatch.setattr("engine.orchestrator.server.FREE_S", 0.0)
    monkeypatch.setattr("engine.wire.address.ELSEWHERE", "127.0.0.9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listen, rendezvous, said = (
            one.replace("TAKEN", str(port)).replace("BEFORE", str(port - 1)) for one in (listen, rendezvous, said)
        )
        parallel = {**NODES, "rendezvous": rendezvous} if rendezvous else {}
        config = Config(rollout={"listen": listen}, parallel=parallel)
        with pytest.raises(BadInput, match=said) if said else contextlib.nullcontext():
            check_addresses(config)
        with pytest.raises(BadInput, match=said) if said and "in use" not in said else contextlib.nullcontext():
            check_addresses(config, free=False)


async def test_a_port_that_is_taken(tmp_path):
    async with Scripted().serving() as url:
        with pytest.raises(BadInput, match=r"rollout\.listen = '127.0.0.1:\d+'"):
            async with running(tmp_path, listen=url.removeprefix("http://")):
                pass


async def test_status_and_metrics_say_the_same(tmp_path):
    async with joined(tmp_path) as (pool, server, call, _):
        last = {"step": 4, "loss": -0.25, "versions_seen": [4]}
        server.serve(SimpleNamespace(last=last, failure=None, status=lambda: {"held_bytes": 7}))
        pool.instances[0].record_version(4)
        status = (await call("GET", "/status"))[1]
        one = status["instances"][0]
        assert (status["pool_size"], status["step"], status["failure"], status["held_bytes"]) == (1, 4, None, 7)
        assert (one["state"], one["version"], one["running"]) == ("serving", 4, 0)
        text = (await call("GET", "/metrics"))[1]
        samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        guest = ("instance", "guest")
        assert samples["metronome_pool_size", ()] == 1
        assert samples["metronome_step_loss", ()] == -0.25
        for key in ("running", "waiting", "version", "restarts", "tokens_per_s", "groups", "failures"):
            assert samples[f"metronome_pool_instance_{key}", (guest,)] == one[key]
        assert samples["metronome_pool_instance_state", (guest, ("state", "serving"))] == 1
        assert samples["metronome_pool_instance_state", (guest, ("state", "out"))] == 0


SIZES = {
    "serving": (1, ()),
    "updating": (1, (Instance.begin_update,)),
    "draining": (0, (Instance.drain,)),
    "out": (0, (lambda one: one.exclude("out"),)),
    "starting": (0, (lambda one: one.exclude("out"), Instance.wait_for_weights)),
}
"""The size of a pool with an instance of this state, and the way there from serving."""


@pytest.mark.parametrize("state", SIZES)
async def test_the_size_of_the_pool_is_the_same_wherever_it_is_told(tmp_path, state):
    size, steps = SIZES[state]
    # nobody looks after it meanwhile: its next heartbeat would bring it back
    async with joined(tmp_path, heartbeat_s=60) as (pool, _, call, _):
        for act in steps:
            act(pool.instances[0])
        assert (pool.size, (await call("GET", "/status"))[1]["pool_size"]) == (size, size)
        assert f"\nmetronome_pool_size {size}.0\n" in (await call("GET", "/metrics"))[1]


async def test_an_instance_for_which_there_are_not_files_enough_does_not_join(tmp_path, monkeypatch):
    """Its connections would fail in the middle of a step, and be counted as its faults."""
    async with running(tmp_path, concurrency=16) as (pool, _, call):
        monkeypatch.setattr(limits, "reachable_limit", lambda: limits.open_files(pool.config, 2))
        for number, expected in ((0, 200), (1, 200), (2, 400), (1, 200)):
            guest = SPOKEN | {"name": f"guest-{number}", "url": f"http://127.0.0.1:{4711 + number}"}
            status, reply = await call("POST", "/join", guest)
            assert status == expected, reply
        assert [one.name for one in pool.instances] == ["guest-0", "guest-1"]
        told = (await call("POST", "/join", GOOD))[1]["error"]["message"]
        assert "open files: the run needs" in told
        assert "raise the hard limit (ulimit -Hn)" in told


async def test_nobody_joins_before_the_run_takes_instances_nor_when_it_is_ending(tmp_path):
    async with running(tmp_path, taken=False) as (pool, server, call):
        assert (await call("POST", "/join", GOOD))[0] == 425
        assert (await call("POST", "/leave", {"name": "guest"}))[0] == 404
        assert (await call("GET", "/status"))[1]["instances"] == []
        assert (await call("GET", "/metrics"))[0] == 200
        server.serve_pool(pool)
        pool.give_up(ProcessDied("no rollout instance is left"))
        status, reply = await call("POST", "/join", GOOD)
        assert (status, "no rollout instance is left" in reply["error"]["message"]) == (503, True)
        assert (await call("GET", "/status"))[1]["failure"] == "no rollout instance is left"
