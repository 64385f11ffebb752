"""The text of token ids is the same wherever it is decoded: in the orchestrator, and in a verifier process."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.data.tokenizer import Tokenizer, make_decoder, make_pieces
from engine.errors import BadInput
from engine.wire.verifier_messages import LoadTokenizer
from support.runs import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model)


QWEN = byte_tokenizer(256).chat_template
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.fixture
def tagged(tmp_path):
    """A folder with a tokenizer of our own whose tags are special tokens, as a TRL script adds them."""

    def save(end=None, template=QWEN, **named):
        made = byte_tokenizer(256)
        made.chat_template = template
        made.add_special_tokens({"extra_special_tokens": [*made.extra_special_tokens, *TAGS], **named})
        made.save_pretrained(tmp_path)
        if end is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        return tmp_path

    return save


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 259), max_size=12))  # halves of characters and special tokens, too
def test_every_way_to_decode_gives_the_text_of_transformers(tokenizer, tiny_model, ids):
    kept = [one for one in ids if one not in (256, 258, 259)]  # ends of sequence and turn, padding
    expected = tokenizer.hf.decode(kept, clean_up_tokenization_spaces=False)
    sent = tokenizer.for_verifiers
    assert sent.json
    slow = LoadTokenizer(model=str(tiny_model), left_out=sent.left_out)
    assert tokenizer.decode(tuple(ids)) == make_decoder(sent)(ids) == make_decoder(slow)(ids) == expected


def test_special_tokens_that_the_model_wrote_are_text(tagged):
    text = "<think>2+2</think><answer>4</answer>"
    tokenizer = Tokenizer(tagged())
    ids = tokenizer.hf(text)["input_ids"]
    assert set(ids) & set(tokenizer.hf.all_special_ids)
    end = tokenizer.hf.eos_token_id
    for decode in (tokenizer.decode, make_decoder(tokenizer.for_verifiers)):
        assert decode([*ids, end]) == text


BEGUN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</answer><|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><think>{% endif %}"
)
"""A template of our own: each turn ends with an end of answer too, and the next one begins with a thought."""
ALL = "<|im_start|><think>4<|im_end|></think><answer>4</answer>#<|im_end|><|endoftext|><|pad|>"


@pytest.mark.parametrize(
    ("stop", "saved", "left_out"),
    [
        ((), {}, ["<|im_end|>"]),  # the chat template ends turns with it
        (("</answer>", "#"), {}, ["<|im_end|>"]),
        ((), {"template": BEGUN}, ["<|im_end|>", "</answer>"]),
        ((), {"template": "{{ messages[0].content }}<think>"}, []),  # one that takes no answer
        ((), {"template": "{{ raise_exception('no') }}<|im_end|>"}, []),
        ((), {"template": None}, []),
        (("<|im_end|>", "#"), {"template": None}, ["<|im_end|>"]),
        ((), {"template": None, "end": [256, 258]}, ["<|im_end|>"]),  # generation_config.json says so
        ((), {"template": None, "bos_token": "<think>", "unk_token": "<answer>"}, ["<think>"]),
    ],
)
def test_only_what_begins_ends_or_fills_a_sequence_or_ends_a_turn_is_left_out(tagged, stop, saved, left_out):
    tokenizer = Tokenizer(tagged(**saved), stop)
    expected = ALL
    for token in ("<|endoftext|>", "<|pad|>", *left_out):
        expected = expected.replace(token, "")
    assert tokenizer.decode(tokenizer.hf(ALL)["input_ids"]) == expected


def test_a_stop_of_several_tokens_is_refused_and_others_are_known_by_their_ids(tagged):
    folder = tagged()
    assert Tokenizer(folder, ("#", "</answer>")).stop_ids == (256, ord("#"), 263)
    with pytest.raises(BadInput, match=r"rollout.stop 'ab' is 2 tokens"):
        Tokenizer(folder, ("ab",))


def test_a_tokenizer_that_the_library_tokenizers_does_not_have_is_loaded_from_the_models_folder(
    tiny_model, monkeypatch
):
    class Slow:
        """Another kind of tokenizer: without a `backend_tokenizer`."""

        eos_token_id = 256
        chat_template = None

        def __init__(self, whole):
            self.decode = whole.decode
            self.special_tokens_map = whole.special_tokens_map
            self.convert_tokens_to_ids = whole.convert_tokens_to_ids
            self.all_special_ids = whole.all_special_ids
            self.vocab_files_names = whole.vocab_files_names

    whole = AutoTokenizer.from_pretrained(tiny_model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *arguments, **options: Slow(whole))
    slow = Tokenizer(tiny_model)
    assert (slow.for_verifiers.json, slow.for_verifiers.model) == (b"", str(tiny_model))
    ids = [*b"1+1=2", 256]
    assert slow.decode(ids) == "1+1=2"
    monkeypatch.undo()
    assert make_decoder(slow.for_verifiers)(ids) == "1+1=2"


def test_without_a_tokenizer_nothing_is_decoded():
    with pytest.raises(ValueError, match="must come with its text"):
        make_decoder(LoadTokenizer())([1])
    assert make_pieces(LoadTokenizer()) is None


def test_the_pieces_of_a_text_are_its_tokens_and_a_character_of_several_is_whole(tokenizer):
    text = " 2+2 is 四, naïve \U0001f389"
    ids = tokenizer.hf.encode(text, add_special_tokens=False)
    for _ in range(2):  # the second time they are known
        pieces = tokenizer.pieces(ids)
        assert "".join(pieces) == text
        assert len(pieces) == len(ids)
    assert "\U0001f389" in pieces
    assert tokenizer.pieces([*b"a", 0xE5]) == ["a", "\ufffd"]  # cut within a character
