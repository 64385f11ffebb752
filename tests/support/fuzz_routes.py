"""A fuzz test of the HTTP routes of a rollout instance, whichever engine it is.

Requests are written to a socket as bytes, so that they may break every rule. After each one: no 5xx, an answer or an
end of the connection before the deadline, and, when it was refused, the same tokens and log-probabilities for a fixed
request, by the same weight version.
"""

import json
import socket
import time
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.fuzz_requests import finishes, request_bytes, updates

BASE = {"transport": "base", "perturb": []}
ALIKE = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


def batched(items, size):
    """Lists of so many items; the last may be shorter."""
    items = list(items)
    return [items[first : first + size] for first in range(0, len(items), size)]


class Hang(AssertionError):
    """No answer, and no end of the connection, before the deadline."""


@dataclass
class Server:
    """A running instance, and how long it may take to answer anything."""

    host: str
    port: int
    token: str = ""
    deadline_s: float = 20.0
    prompt: tuple[int, ...] = (5, 9, 20, 33, 7)
    reference: dict = field(default_factory=dict)
    checked: int = 0

    def send(self, raw, pause_s=0.0):
        """Status and body of the answer to these bytes; None when the connection ended without.
        A pause halves the bytes."""
        deadline = time.monotonic() + self.deadline_s
        with self.connect() as connection:
            try:
                connection.sendall(raw[: len(raw) // 2] if pause_s else raw)
                if pause_s:
                    time.sleep(pause_s)
                    connection.sendall(raw[len(raw) // 2 :])
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all of it was sent; the answer may be there
            return _answer(connection, deadline, raw)

    def connect(self):
        """A connection of its own."""
        return socket.create_connection((self.host, self.port), timeout=self.deadline_s)

    def until(self, holds):
        """Wait until /load is as wanted."""
        deadline = time.monotonic() + self.deadline_s
        while not holds(load := json.loads(self.call("GET", "/load")[1])):
            assert time.monotonic() < deadline, load
            time.sleep(0.01)

    def call(self, method, route, body=None):
        """A request as it should be."""
        return self.send(
            request_bytes(method, route, json.dumps({} if body is None else body).encode(), self.authorization())
        )

    def authorization(self):
        return [("Authorization", f"Bearer {self.token}")] if self.token else []

    def state(self):
        """What a refused request must not change: what the instance generates, by which weights;
        needs it not to be paused."""
        body = {
            "prompt": list(self.prompt),
            "max_tokens": 6,
            "temperature": 1.0,
            "seed": 7,
            "ignore_eos": True,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        status, reply = self.call("POST", "/v1/completions", body)
        assert status == 200, reply
        reply = json.loads(reply)
        choice = reply["choices"][0]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
            "finish": choice["finish_reason"],
            "version": reply["weight_version"],
            "holds": json.loads(self.call("GET", "/load")[1])["weight_version"],
        }

    def restore(self):
        """Undo what an accepted request did."""
        self.expect(200, "/pause?mode=abort", {})
        if self.call("POST", "/resume")[0] == 409:  # a weight update has begun
            self.update(self.reference["version"])

    def update(self, version):
        """A whole weight update, to the weights of the model's folder."""
        self.expect(200, "/begin_weight_update", {})
        self.expect(200, "/update_weights", {"update_info": BASE})
        self.expect(200, "/finish_weight_update", {"weight_version": version})

    def expect(self, statuses, route, body):
        """A POST whose answer must have one of these statuses."""
        answer = self.call("POST", route, body)
        status = answer and answer[0]
        assert status in (statuses if isinstance(statuses, range) else (statuses,)), (route, body, answer)

    def check(self, raw):
        """Send the bytes and look at everything the module's docstring promises."""
        answer = self.survive(raw)
        assert self.state() == self.reference, (raw[:2000], answer)

    def check_all(self, raws, at_once=8):
        """The same for many requests, with one look at the state for every few: what changed it is among those."""
        for batch in batched(raws, at_once):
            answers = [(raw[:300], self.survive(raw)) for raw in batch]
            assert self.state() == self.reference, answers

    def survive(self, raw):
        """The answer: no 5xx, in time. What an accepted request did is undone."""
        self.checked += 1
        answer = self.send(raw)
        status = answer and answer[0]
        assert status is None or status < 500, (raw[:2000], answer)
        if status is None or 200 <= status < 400:
            self.restore()
        return answer

    def begin(self):
        """Take the reference; the first requests warm up what is lazy."""
        self.state()
        self.reference = self.state()


def _answer(connection, deadline, raw):
    """Read the last answer to its end, or to the end of the connection."""
    received = bytearray()
    try:
        while (found := _parse(received)) is None:
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            part = connection.recv(65536)
            if not part:
                break
            received += part
    except TimeoutError:
        raise Hang(f"no end within the deadline; got {bytes(received[:300])!r} for {raw[:2000]!r}") from None
    except ConnectionResetError:
        found = _parse(received)
    if found is None and received:  # without a length, or with one and no body, as after HEAD
        head, _, body = bytes(received).partition(b"\r\n\r\n")
        return int(head.split(None, 2)[1]), body
    return found


def _parse(received):
    """Status and body of an answer that is whole, by its length; None while it is not."""
    head, end, body = bytes(received).partition(b"\r\n\r\n")
    if not end:
        return None
    status = int(head.split(None, 2)[1])
    if status < 200:  # 100 Continue goes before the answer
        return _parse(body)
    length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return (status, body) if length and len(body) >= length[0] else None


def fuzz(server, examples, strategy):
    """Run so many examples of one strategy; hypothesis shows the smallest failing one."""

    @settings(ALIKE, max_examples=examples)
    @given(strategy)
    def run(raw):
        server.check(raw)

    run()


def fuzz_update(server, examples):
    """Bad bodies in the middle of a weight update; then the weights of the model's folder,
    which it has, bring it to its end."""

    @settings(ALIKE, max_examples=examples)
    @given(st.lists(updates, min_size=1, max_size=3), finishes)
    def run(bodies, finish):
        version = server.reference["version"] + 1
        server.expect(200, "/begin_weight_update?mode=abort", {})
        for body in bodies:
            server.expect(range(400, 500), "/update_weights", body)
        server.expect(range(400, 500), "/finish_weight_update", finish)
        server.update(version)
        server.reference |= {"version": version, "holds": version}
        assert server.state() == server.reference, bodies

    run()
