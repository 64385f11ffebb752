import pytest

from engine.errors import BadInput
from engine.instance.embedded.sampling import draw_uniforms
from engine.instance.protocol import RequestLimits, parse_completion, parse_finish, parse_info, parse_object
from engine.instance.vllm.backend import sampling_arguments

LIMITS = RequestLimits(vocabulary=50, max_context=20, stop_ids=frozenset({1}))


def test_defaults_are_vllms_and_max_tokens_is_cut_to_the_context():
    found = parse_completion({"prompt": [3, 4]}, LIMITS)
    assert found.prompt == (3, 4)
    assert (found.max_tokens, found.temperature, found.top_p, found.top_k) == (16, 1.0, 1.0, 0)
    assert found.stop_ids == {1}
    found = parse_completion({"prompt": [2] * 15, "max_tokens": 100, "ignore_eos": True, "stop_token_ids": [9]}, LIMITS)
    assert (found.max_tokens, found.stop_ids) == (5, {9})


def test_everything_that_is_asked_for_arrives():
    sampling = parse_completion(
        {
            "prompt": [3],
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 7,
            "seed": -4,
            "stop_token_ids": [9],
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "model": "m",
        },
        LIMITS,
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 7)
    assert sampling.seed == -4
    assert sampling.stop_ids == {1, 9}


def test_a_continued_response_draws_new_numbers_in_either_engine():
    def asked(**more):
        return parse_completion({"prompt": [2, 3, 4, 5], "max_tokens": 6, "seed": 7} | more, LIMITS)

    whole, rest = (draw_uniforms(asked(**more)) for more in ({"max_tokens": 8}, {"continued": 2}))
    assert rest == whole[2:]  # the embedded engine's
    seeds = [
        sampling_arguments(asked(continued=count))["seed"] for count in range(4)
    ]  # vLLM begins a stream with each request
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_arguments(asked(continued=2)) == sampling_arguments(asked()) | {"seed": seeds[2]}


def test_without_a_seed_two_requests_differ():
    drawn = {tuple(draw_uniforms(parse_completion({"prompt": [2]}, LIMITS))) for _ in range(20)}
    assert len(drawn) == 20


BAD = [
    {"prompt": []},
    {},
    {"prompt": [2] * 20},
    {"prompt": "text"},
    {"prompt": [[2]]},
    {"prompt": [2.0]},
    {"prompt": [True]},
    {"prompt": [50]},
    {"prompt": [-1]},
    {"prompt": [2], "max_tokens": 0},
    {"prompt": [2], "max_tokens": 1.5},
    {"prompt": [2], "max_tokens": "8"},
    {"prompt": [2], "max_tokens": True},
    {"prompt": [2], "temperature": -1},
    {"prompt": [2], "temperature": 1e-9},
    {"prompt": [2], "temperature": float("nan")},
    {"prompt": [2], "temperature": float("inf")},
    {"prompt": [2], "temperature": "hot"},
    {"prompt": [2], "top_p": 0},
    {"prompt": [2], "top_p": 1.01},
    {"prompt": [2], "top_k": -2},
    {"prompt": [2], "top_k": 1.0},
    {"prompt": [2], "seed": 2**63},
    {"prompt": [2], "seed": 1.0},
    {"prompt": [2], "stop_token_ids": [50]},
    {"prompt": [2], "stop_token_ids": 3},
    {"prompt": [2], "n": 2},
    {"prompt": [2], "n": True},
    {"prompt": [2], "logprobs": 5},
    {"prompt": [2], "return_token_ids": False},
    {"prompt": [2], "ignore_eos": 1},
    {"prompt": [2], "min_p": 0.1},
    {"prompt": [2], "model": 3},
    {"prompt": [2, 3], "continued": 2},
    {"prompt": [2, 3], "continued": -1},
]


BAD += [{"prompt": [2], key: 10**4000} for key in ("temperature", "top_p", "top_k", "max_tokens", "seed")]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_cannot_be_served_as_asked_is_refused_by_name(body):
    with pytest.raises(BadInput, match=next(reversed(body), "prompt")) as refused:
        parse_completion(body, LIMITS)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b"{",
        b"\xff",
        b"null",
        b'{"x": "\\ud800"}',
        b'{"\xed\xa0\x80": 1}',
        b"[" * 100_000,
        b"[1" + b"0" * 5000 + b"]",  # more digits than Python reads
    ],
)
def test_only_json_objects_are_read(body):
    with pytest.raises(BadInput):
        parse_object(body)


def test_prompt_logprobs_are_asked_for_by_0():
    assert parse_completion({"prompt": [2], "prompt_logprobs": 0}, LIMITS).prompt_logprobs
    assert not parse_completion({"prompt": [2]}, LIMITS).prompt_logprobs
    assert not parse_completion({"prompt": [2], "prompt_logprobs": None}, LIMITS).prompt_logprobs
    for value in (1, -1, False, True, 0.0, "0"):
        with pytest.raises(BadInput, match="prompt_logprobs"):
            parse_completion({"prompt": [2], "prompt_logprobs": value}, LIMITS)


def test_weight_bodies():
    assert parse_info({"update_info": {"path": "a"}}, "update_info") == {"path": "a"}
    assert parse_finish({"weight_version": 3}, LIMITS) == (3, ())
    assert parse_finish({"weight_version": 3, "probe": [4, 49]}, LIMITS) == (3, (4, 49))
    for bad in ({"update_info": None}, {"update_info": 3}, {"update_info": [1]}):
        with pytest.raises(BadInput, match="update_info"):
            parse_info(bad, "update_info")
    for bad in ({}, {"weight_version": -1}, {"weight_version": "3"}):
        with pytest.raises(BadInput, match="weight_version"):
            parse_finish(bad, LIMITS)
    for probe in ([4], [50, 4], [4] * 20, "4"):
        with pytest.raises(BadInput, match="probe"):
            parse_finish({"weight_version": 3, "probe": probe}, LIMITS)
