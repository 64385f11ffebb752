import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.tools.quickstart_model.byte_tokenizer import END, PAD, SPECIAL_TOKENS, build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build(2048).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_is_its_utf8_bytes_and_comes_back(tokenizer, text):
    assume(not any(token in text for token in SPECIAL_TOKENS))  # they have ids of their own: next test
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "\n", "\r\n", "\t", "é", "漢", "🙂", "a", ".", "\x00", "\x7f"])))
def test_special_tokens_spaces_and_control_characters_come_back(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@given(st.binary(max_size=40))
def test_every_byte_sequence_can_be_decoded(tokenizer, raw):
    assert tokenizer.decode(list(raw)) == raw.decode(errors="replace")


def test_vocabulary_and_special_ids(tokenizer):
    assert len(tokenizer) == 260
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258, 259]
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert tokenizer.model_max_length == 2048


def test_special_tokens_are_left_out_of_responses(tokenizer):
    ids = [*b"59041#9", tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "59041#9"


def test_chat_template_is_qwens(tokenizer):
    chat = [{"role": "user", "content": "315+849="}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n315+849=<|im_end|>\n<|im_start|>assistant\n"
