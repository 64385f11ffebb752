import json

import pytest

from engine.errors import BadInput
from engine.rollout.server.protocol import Limits, parse_completion, parse_object, parse_update_path, parse_version

LIMITS = Limits(vocabulary=50, max_context=20, stop_ids=frozenset({1}))


def test_defaults_are_vllms():
    prompt, sampling = parse_completion({"prompt": [3, 4]}, LIMITS)
    assert prompt == (3, 4)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert sampling.stop_ids == {1}


def test_everything_that_is_asked_for_arrives():
    _, sampling = parse_completion(
        {"prompt": [3], "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -4, "stop_token_ids": [9],
         "n": 1, "logprobs": 0, "return_token_ids": True, "model": "m"}, LIMITS)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 7)
    assert sampling.seed == -4
    assert sampling.stop_ids == {1, 9}


def test_max_tokens_is_cut_to_the_context():
    assert parse_completion({"prompt": [2] * 15, "max_tokens": 100}, LIMITS)[1].max_tokens == 5


def test_ignore_eos_leaves_the_requests_own_stop_tokens():
    assert parse_completion({"prompt": [2], "ignore_eos": True, "stop_token_ids": [9]}, LIMITS)[1].stop_ids == {9}


def test_without_a_seed_two_requests_differ():
    seeds = {parse_completion({"prompt": [2]}, LIMITS)[1].seed for _ in range(20)}
    assert len(seeds) == 20


BAD = [
    {"prompt": []}, {}, {"prompt": [2] * 20}, {"prompt": "text"}, {"prompt": [[2]]}, {"prompt": [2.0]},
    {"prompt": [True]}, {"prompt": [50]}, {"prompt": [-1]}, {"prompt": [2], "max_tokens": 0},
    {"prompt": [2], "max_tokens": 1.5}, {"prompt": [2], "max_tokens": "8"}, {"prompt": [2], "max_tokens": True},
    {"prompt": [2], "temperature": -1}, {"prompt": [2], "temperature": 1e-9},
    {"prompt": [2], "temperature": float("nan")}, {"prompt": [2], "temperature": float("inf")},
    {"prompt": [2], "temperature": "hot"}, {"prompt": [2], "top_p": 0}, {"prompt": [2], "top_p": 1.01},
    {"prompt": [2], "top_k": -2}, {"prompt": [2], "top_k": 1.0}, {"prompt": [2], "seed": 2**63},
    {"prompt": [2], "seed": 1.0}, {"prompt": [2], "stop_token_ids": [50]}, {"prompt": [2], "stop_token_ids": 3},
    {"prompt": [2], "n": 2}, {"prompt": [2], "n": True}, {"prompt": [2], "logprobs": 5},
    {"prompt": [2], "return_token_ids": False}, {"prompt": [2], "ignore_eos": 1}, {"prompt": [2], "min_p": 0.1},
    {"prompt": [2], "model": 3},
]


@pytest.mark.parametrize("body", BAD, ids=json.dumps)
def test_what_cannot_be_served_as_asked_is_refused_by_name(body):
    with pytest.raises(BadInput, match=next(reversed(body), "prompt")):
        parse_completion(body, LIMITS)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"null"])
def test_only_json_objects_are_read(body):
    with pytest.raises(BadInput):
        parse_object(body)


def test_weight_bodies():
    assert parse_update_path({"update_info": {"path": "a"}}) == "a"
    assert parse_version({"weight_version": 3}) == 3
    for bad in ({}, {"update_info": None}, {"update_info": {"path": 3}}):
        with pytest.raises(BadInput, match="update_info"):
            parse_update_path(bad)
    for bad in ({}, {"weight_version": -1}, {"weight_version": "3"}):
        with pytest.raises(BadInput, match="weight_version"):
            parse_version(bad)
