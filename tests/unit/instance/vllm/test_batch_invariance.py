"""The probe of a deterministic instance: what it asks, and that any other bit in a reply is a refusal. What becomes of
an instance that is refused: tests/vllm/test_instances.py."""

import json
import math
import os
import random
import threading

import pytest

from engine.errors import BadInput, DeadlineError
from engine.instance.vllm import batch_invariance, serve
from engine.instance.vllm.batch_invariance import check_invariance, first_difference, invariance_requests

ALONE, AGAIN, TOGETHER, LATE = range(4)
SLOTS = 3
CONTEXT = 96


def reply(tokens, logprobs):
    return {"choices": [{"token_ids": list(tokens), "logprobs": {"token_logprobs": list(logprobs)}}]}


class Instance:
    """Replies depend on prompt and seed; the replies to the probed request (seed 0) may be spoilt one by one.

    It holds requests back while it is paused, has as many slots as vLLM would have, and notes what it was asked.
    """

    def __init__(self, spoil=lambda situation, tokens, logprobs: None, holds=True):
        self.spoil = spoil
        self.holds = holds
        self.open = threading.Event()
        self.open.set()
        self.lock = threading.Lock()
        self.waiting = 0
        self.probed = 0
        self.asked = []

    def __call__(self, method, path, body):
        self.asked.append((method, path))
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/load":
            return {"waiting": self.waiting if self.holds else 0}
        if path.startswith("/pause"):
            self.open.clear()
        elif path == "/resume":
            self.open.set()
        return {}

    def complete(self, body):
        with self.lock:
            self.waiting += 1
            situation = TOGETHER if not self.open.is_set() else (ALONE, AGAIN, LATE)[min(self.probed, 2)]
        self.open.wait()
        with self.lock:
            self.waiting -= 1
            draw = random.Random(json.dumps(body))
            tokens = [draw.randrange(100) for _ in range(body["max_tokens"])]
            logprobs = [-draw.random() for _ in tokens]
            if body["seed"] == 0:
                self.spoil(situation, tokens, logprobs)
                self.probed += 1
        # through JSON, as over HTTP: no bit may be lost there
        return json.loads(json.dumps(reply(tokens, logprobs)))


def test_equal_bits_pass_and_the_batch_is_full():
    instance = Instance()
    check_invariance(instance, SLOTS, CONTEXT, "vLLM 9 on cpu")
    assert instance.probed == 4
    assert instance.asked.count(("POST", "/v1/completions")) == 4 + SLOTS
    order = [path for _, path in instance.asked if path not in ("/v1/completions", "/load")]
    assert order == ["/reset_prefix_cache", "/pause?mode=wait", "/resume"]


def other_token(tokens, logprobs):
    tokens[1] += 1


def one_less(tokens, logprobs):
    tokens.pop()
    logprobs.pop()


def last_bit(tokens, logprobs):
    logprobs[7] = math.nextafter(logprobs[7], 0.0)


@pytest.mark.parametrize(
    ("spoilt", "spoil", "said"),
    [
        (
            AGAIN,
            last_bit,
            "when it is repeated with its prompt in the prefix cache: the log-probability of its token 7",
        ),
        (TOGETHER, other_token, "in a full batch: its token 1 is "),
        (LATE, last_bit, "in a full batch, with its prompt in the prefix cache: the log-probability of its token 7"),
        (LATE, one_less, "prefix cache: it has 47 tokens instead of 48"),
    ],
)
def test_any_other_bit_is_a_refusal(spoilt, spoil, said):
    instance = Instance(lambda at, *reply: spoil(*reply) if at == spoilt else None)
    with pytest.raises(BadInput) as refusal:
        check_invariance(instance, SLOTS, CONTEXT, "vLLM 9 on cpu")
    message = str(refusal.value)
    assert "\n" not in message  # the orchestrator shows a line
    assert message.startswith(
        "rollout.deterministic = true, but vLLM 9 on cpu gives different bits for the same request "
    )
    assert said in message
    assert "Set rollout.deterministic = false, or use" in message


def test_signs_of_zeros_are_bits_too():
    assert first_difference(reply([4], [0.0]), reply([4], [-0.0]))


@pytest.mark.parametrize("context", [2, 3, 5, CONTEXT, 4096])
@pytest.mark.parametrize("slots", [1, 256])
def test_every_request_has_room_in_the_context(slots, context):
    request, others = invariance_requests(slots, context)
    assert len(others) == slots
    assert len(request["prompt"]) + request["max_tokens"] <= context
    assert all(1 <= len(one["prompt"]) < context and one["max_tokens"] >= 1 for one in others)
    if slots > 1 and context >= CONTEXT:
        assert len({len(one["prompt"]) for one in others}) > 10
        assert len({one["max_tokens"] for one in others}) > 10
    assert len({one["seed"] for one in (request, *others)}) == slots + 1


def test_requests_that_never_wait_are_named_and_let_go(monkeypatch):
    monkeypatch.setattr(batch_invariance, "WAIT_S", 0.1)
    instance = Instance(holds=False)
    with pytest.raises(
        DeadlineError, match=r"0 of 4 requests of the probe are still waiting at the instance after 0\.1 s"
    ):
        check_invariance(instance, SLOTS, CONTEXT, "vLLM 9 on cpu")
    assert instance.open.is_set()


@pytest.mark.parametrize(
    ("arguments", "given", "left"),
    [
        (["--device", "cuda", "--deterministic"], None, "1"),
        (["--device", "npu", "--deterministic"], None, "1"),
        (["--device", "cuda", "--deterministic"], "0", "0"),  # the user's; the probe decides
        (["--device", "cuda"], None, None),
        (["--device", "cpu", "--deterministic"], None, None),
    ],
)
def test_devices_with_batch_invariant_kernels_are_told_to_use_them(monkeypatch, arguments, given, left):
    variables = {} if given is None else {batch_invariance.VARIABLE: given}
    monkeypatch.setattr(os, "environ", variables)
    serve._set_environment(serve._parser().parse_args(["--model", "m", *arguments]))
    assert variables.get(batch_invariance.VARIABLE) == left
