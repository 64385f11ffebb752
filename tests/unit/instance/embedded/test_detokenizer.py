"""Text of a response token by token: incomplete characters and the beginnings of stop strings are held back."""

import random

import pytest

from engine.data.tokenizer import Tokenizer
from engine.instance.embedded.text_routes import Detokenizer
from support.runs import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(256).save_pretrained(folder)
    return Tokenizer(folder)


def pieces(detokenizer, tokens):
    found = []
    for token in tokens:
        found.append(detokenizer.add_token(token))
        if detokenizer.stopped:
            break
    return [*found, detokenizer.finish_text()]


def test_a_character_comes_when_its_last_byte_does(tokenizer):
    assert pieces(Detokenizer(tokenizer), "aé€b".encode()) == ["a", "", "é", "", "", "€", "b", ""]


def test_any_bytes_give_the_text_of_the_whole(tokenizer):
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(260) for _ in range(draw.randrange(30))]
        assert "".join(pieces(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens)


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not(tokenizer):
    assert pieces(Detokenizer(tokenizer, ["END"]), b"xEEyEN") == ["x", "", "E", "Ey", "", "", "EN"]


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("abcENDdef", ["END"], "abc"),
        ("abcENDdef", ["def", "cE"], "ab"),
        ("aaaab", ["aab"], "aa"),
        ("END", ["END"], ""),
        ("a€b", ["€"], "a"),
        ("abc", ["END"], "abc"),
    ],
)
def test_the_text_ends_before_the_first_stop_string(tokenizer, text, stops, before):
    detokenizer = Detokenizer(tokenizer, stops)
    assert "".join(pieces(detokenizer, text.encode())) == before
    assert detokenizer.stopped == (before != text)
