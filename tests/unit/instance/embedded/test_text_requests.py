"""Requests with text: whatever comes is either served as asked or refused by name; and the pieces of a stream."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.data.tokenizer import Tokenizer
from engine.instance.embedded.text_routes import KEYS, MOST, ONLY, ReplyForm, SampledToken, _pieces, parse_request
from engine.instance.protocol import SEEDS, RequestLimits
from engine.instance.refusals import Refusal
from support.fuzz_requests import values
from support.runs import byte_tokenizer

LIMITS = RequestLimits(272, 64, frozenset({1}))
EOS = 256
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(64).save_pretrained(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def read(tokenizer):
    return lambda body: parsed(body, "messages" in body, tokenizer)


def parsed(body, chat, tokenizer):
    return parse_request(body=body, chat=chat, model="tiny", tokenizer=tokenizer, limits=LIMITS)


def test_each_response_has_a_seed_of_its_own_and_stops_at_the_tokenizers_end(read):
    asked = read({"prompt": ["a", "b"], "n": 2, "seed": SEEDS.stop - 1})
    assert [one.prompt for one in asked.completions] == [(97,), (97,), (98,), (98,)]
    assert [one.seed for one in asked.completions] == [SEEDS.stop - 1, SEEDS.start] * 2
    assert {one.stop_ids for one in asked.completions} == {frozenset({1, EOS})}
    assert read({"prompt": "a", "ignore_eos": True}).completions[0].stop_ids == frozenset()
    assert asked.prompt_tokens == 2


def test_a_chat_may_use_the_whole_context_and_a_completion_sixteen_tokens(read):
    (chat,) = read(HELLO).completions
    assert chat.max_tokens == LIMITS.max_context - len(chat.prompt)
    assert read(HELLO | {"max_tokens": 5, "max_completion_tokens": 7}).completions[0].max_tokens == 7
    assert read({"prompt": "a"}).completions[0].max_tokens == 16


@pytest.mark.parametrize(
    ("body", "key", "said"),
    [
        ({"max_tokens": 1000}, "max_tokens", "max_tokens = 1000"),
        ({"max_tokens": 5, "max_completion_tokens": 1000}, "max_completion_tokens", "max_completion_tokens = 1000"),
        ({"prompt": "a" * (LIMITS.max_context - 5), "max_tokens": 6}, "max_tokens", "max_tokens = 6"),
        ({"prompt": "a" * (LIMITS.max_context - 5)}, "prompt", "max_tokens = 16"),
    ],
)
def test_more_tokens_than_the_context_has_room_for_are_refused(read, body, key, said):
    room = 5 if "prompt" in body else LIMITS.max_context - len(read(HELLO).completions[0].prompt)
    with pytest.raises(Refusal) as refused:
        read(body if "prompt" in body else HELLO | body)
    assert (refused.value.status, refused.value.param) == (400, key)
    assert str(refused.value).startswith(f"{key}: {said} and a prompt of {LIMITS.max_context - room} tokens")
    assert f"maximum context length of {LIMITS.max_context} tokens, which leaves {room}" in str(refused.value)
    body = {"prompt": "a" * (LIMITS.max_context - 5), "max_tokens": 5}
    assert read(body).completions[0].max_tokens == 5


def test_a_template_has_variables_but_none_of_the_programs_arguments(read):
    read(HELLO | {"chat_template_kwargs": {"enable_thinking": False}})
    for name in ("chat_template", "tokenize", "add_generation_prompt", "conversation"):
        with pytest.raises(Refusal, match="chat_template_kwargs"):
            read(HELLO | {"chat_template_kwargs": {name: "{{ 1 }}"}})


def test_a_template_that_fails_refuses_the_messages(tmp_path):
    made = byte_tokenizer(64)
    made.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    made.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match="chat template of .* no system role") as refused:
        parsed({"messages": [{"role": "system", "content": "hi"}]}, True, Tokenizer(tmp_path))
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_more_responses_than_the_limit_are_refused(read):
    assert len(read({"prompt": ["a"] * MOST}).completions) == MOST
    for body in ({"prompt": "a", "n": MOST + 1}, {"prompt": ["a", "b"], "n": MOST}):
        with pytest.raises(Refusal) as refused:
            read(body)
        assert (refused.value.status, refused.value.param) == (400, "n")


NUMBERS = ("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "logprobs")


@pytest.mark.parametrize("key", [*NUMBERS, "frequency_penalty", "presence_penalty", "top_logprobs"])
@pytest.mark.parametrize("value", [True, False, "1", "nan", [1], {}, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_none_where_one_is_asked(read, key, value):
    """In a completion, or in a chat where only that has the key."""
    body = HELLO if key == "max_completion_tokens" else {"prompt": "a"}
    with pytest.raises(Refusal) as refused:
        read(body | {key: value})
    assert (refused.value.status, refused.value.param) == (400, key)
    assert str(refused.value).startswith(key)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), chat=st.booleans())
def test_any_value_of_any_key_is_served_or_refused(tokenizer, data, chat):
    keys = sorted(KEYS[chat] | ONLY.keys())
    right = HELLO if chat else {"prompt": "a"}
    wrong = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
    body = right | wrong
    if not chat and not isinstance(body["prompt"], str):
        body["prompt"] = ["a", body["prompt"]]
    wrong = None
    try:
        asked = parsed(body, chat, tokenizer)
    except Refusal as refused:
        wrong = refused
    if wrong is not None:
        assert wrong.status in (400, 404)
        assert wrong.param in body or (wrong.param, "stream_options" in body) == ("include_usage", True)
        assert wrong.param in str(wrong)
    else:
        assert 1 <= len(asked.completions) <= MOST
        assert all(len(one.prompt) + one.max_tokens <= LIMITS.max_context for one in asked.completions)


def test_the_offsets_of_streamed_tokens_are_those_of_their_text():
    writer = SimpleNamespace(index=0, text="", tokens=[], reason="")
    pieces = []
    add = _pieces(ReplyForm(False, 1, "m"), writer, True, pieces.append)
    for text in ("a", "bc", "d"):
        writer.tokens.append(SampledToken(text, -1.0))
        writer.text += text
        add(text)
    assert [(one["text"], one["logprobs"]["text_offset"]) for one in pieces] == [("a", [0]), ("bc", [1]), ("d", [3])]
