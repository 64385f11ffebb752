"""What the fuzz test of the routes sends: requests with any content, and bytes that break HTTP itself."""

import json

from hypothesis import strategies as st

from engine.instance import protocol
from engine.wire.messages import BucketInfo

ROUTES = (
    "/v1/completions",
    "/health",
    "/load",
    "/metrics",
    "/pause",
    "/pause?mode=wait",
    "/pause?mode=abort",
    "/resume",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
    "/init_weight_transfer_engine",
    "/begin_weight_update",
    "/begin_weight_update?mode=abort",
    "/update_weights",
    "/finish_weight_update",
)
COMPLETION_KEYS = (*sorted(protocol.COMPLETION_KEYS - {"routes"}), "stream", "stop")
UPDATE_KEYS = (*BucketInfo.__struct_fields__, "perturb")
WEIGHT_KEYS = {
    "/update_weights": "update_info",
    "/finish_weight_update": "weight_version",
    "/init_weight_transfer_engine": "init_info",
}
INIT_KEYS = ("transport", "generation", "stages", "rank", "world_size", "timeout_s")


def request_bytes(method, route, body, headers=(), length=None):
    """A request that asks for the end of its connection."""
    lines = [f"{method} {route} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


NUMBERS = [
    2**31,
    2**63,
    -(2**63) - 1,
    2**64,
    10**400,
    -(10**400),
    -1,
    0,
    1.5,
    1e308,
    1e-308,
    float("nan"),
    float("inf"),
    float("-inf"),
]
TEXTS = ["", "\x00", "\ud800", "/dev/zero", "/", "..", "/proc/self/mem", "x" * 5000]
OTHERS = [None, True, False, [], {}, [None], [[]], [-1], [2**64], [1.0], ["5"], [True], {"a": {}}, [5] * 5000]
ODD = [*NUMBERS, *TEXTS, *OTHERS]

numbers = st.one_of(st.integers(-5, 70), st.sampled_from(NUMBERS), st.floats(), st.integers())
texts = st.one_of(st.text(max_size=12), st.sampled_from(TEXTS))
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


def one_key_wrong(right, keys):
    """A right body with some keys set to anything, so that a single key is what the instance must find."""
    return st.dictionaries(st.sampled_from(keys) | texts, values, min_size=1, max_size=2).map(
        lambda wrong: right | wrong
    )


def completion(prompt):
    # max_tokens stays small unless it is what is odd: an accepted one is answered in time
    return {"prompt": list(prompt), "max_tokens": 2, "n": 1, "logprobs": 0}


bucket = {
    "transport": "file",
    "version": 1,
    "stage": 0,
    "bucket": 0,
    "names": ["model.norm.weight"],
    "dtypes": ["float32"],
    "shapes": [[48]],
    "checksum": "0" * 32,
    "path": "/nowhere/bucket",
    "staged": False,
}
infos = st.one_of(
    st.dictionaries(st.sampled_from(UPDATE_KEYS), values, max_size=5),
    texts.map(lambda path: {"path": path}),
    texts.map(lambda path: bucket | {"path": path}),
    one_key_wrong(bucket, UPDATE_KEYS),
    one_key_wrong({"transport": "base", "perturb": [10**9]}, ("transport",)),
    one_key_wrong({"transport": "staged", "version": 10**6}, ("transport", "version")),
)
updates = st.one_of(infos.map(lambda info: {"update_info": info}), values.filter(lambda value: isinstance(value, dict)))
# never a right one: the instance would wait for a sender, rightly
inits = st.dictionaries(st.sampled_from(INIT_KEYS), scalars, max_size=4).map(lambda info: {"init_info": info})
finishes = st.dictionaries(st.sampled_from(["weight_version"]) | texts, values, max_size=2)
broken_json = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"",
            b"{",
            b"[" * 100_000,
            b'{"prompt":' * 20_000,
            b"nan",
            b"NaN",
            b'{"prompt": [1' + b"0" * 5000 + b"]}",
            b"\xff\xfe{",
            b'{"prompt": [2], "prompt": 3}',
            b"null",
            b'"text"',
            b"1e999",
            b'{"max_tokens": 1e999}',
        ]
    ),
)
route_bodies = st.one_of(
    st.tuples(st.just("/update_weights"), updates | values),
    st.tuples(st.just("/init_weight_transfer_engine"), inits | values),
    st.tuples(st.just("/finish_weight_update"), finishes),
    st.tuples(st.sampled_from(ROUTES), values),
)
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 50]
ODD_PATHS = [
    "*",
    "//",
    "/%00",
    "/v1/completions/../pause",
    "http://other/load",
    "/pause?mode=%ff",
    "/pause?mode=keep",
    "/pause?mode=wait&mode=keep",
    "/load?" + "x" * 20_000,
    "/nowhere",
]
paths = st.one_of(
    st.sampled_from(ROUTES),
    st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), max_size=20).map("/".__add__),
    st.sampled_from(ODD_PATHS),
)
methods = st.sampled_from(METHODS)
ODD_HEADERS = [
    ("Content-Length", "5"),
    ("Content-Length", "-1"),
    ("Content-Length", "x"),
    ("Content-Length", "9" * 30),
    ("Transfer-Encoding", "chunked"),
    ("Transfer-Encoding", "x"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "deflate"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "\x80"),
    ("Expect", "100-continue"),
    ("Expect", "x"),
    ("Host", "a b"),
    ("Upgrade", "websocket"),
    ("Authorization", "Basic x"),
    ("Authorization", "Bearer"),
    ("Authorization", "Bearer \x80"),
    ("Cookie", "=;=,"),
    ("Range", "bytes=5-1"),
    ("X-Long", "y" * 9000),
    ("Accept", ",,;q=x"),
    ("", ""),
]


def dumped(body):
    return json.dumps(body).encode("utf-8", "surrogatepass")


def well_formed(server):
    """HTTP as it should be, with any route, method and body."""
    asked = one_key_wrong(completion(server.prompt), COMPLETION_KEYS)
    by_route = st.one_of(asked.map(lambda body: ("/v1/completions", body)), route_bodies)
    right = by_route.map(lambda pair: request_bytes("POST", pair[0], dumped(pair[1]), server.authorization()))
    broken = st.builds(
        lambda route, body: request_bytes("POST", route, body, server.authorization()),
        st.sampled_from(ROUTES),
        broken_json,
    )
    lost = st.builds(
        lambda method, path, body: request_bytes(method, path, body, server.authorization()),
        methods,
        paths,
        broken_json,
    )
    return st.one_of(right, right, broken, lost)


def table(server):
    """Every key of a completion and of an update with every odd value, every odd header,
    every route by every method."""
    headers = server.authorization()
    for key in COMPLETION_KEYS:
        for value in ODD:
            yield request_bytes("POST", "/v1/completions", dumped(completion(server.prompt) | {key: value}), headers)
    for route, key in WEIGHT_KEYS.items():
        for value in ODD:
            yield request_bytes("POST", route, dumped({key: value}), headers)
    for header in ODD_HEADERS:
        yield request_bytes("POST", "/reset_prefix_cache", b"{}", [*headers, header])
    for path in (*ROUTES, *ODD_PATHS):
        for method in METHODS:
            for body in (b"", b"{}", b"[" * 100_000) if method == "POST" else (b"",):
                yield request_bytes(method, path, body, headers)
