"""The text of token ids is the same wherever it is decoded: in the launcher, and in a verifier process."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.data.tokenizer import Tokenizer, decoder


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 259), max_size=12))  # halves of characters and special tokens, too
def test_every_way_to_decode_gives_the_text_of_transformers(tokenizer, tiny_model, ids):
    expected = tokenizer.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    sent = tokenizer.for_verifiers
    assert sent.json
    assert tokenizer.decode(tuple(ids)) == decoder(sent.json, sent.model)(ids) == expected


def test_a_tokenizer_that_the_library_tokenizers_does_not_have_is_loaded_from_the_models_folder(
    tiny_model, monkeypatch
):
    class Slow:
        """Another kind of tokenizer: without a `backend_tokenizer`."""

        eos_token_id = 256

        def __init__(self, whole):
            self.decode = whole.decode
            self.vocab_files_names = whole.vocab_files_names

    whole = AutoTokenizer.from_pretrained(tiny_model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *arguments, **options: Slow(whole))
    slow = Tokenizer(tiny_model)
    assert (slow.for_verifiers.json, slow.for_verifiers.model) == (b"", str(tiny_model))
    ids = [*b"1+1=2", 256]
    assert slow.decode(ids) == "1+1=2"
    monkeypatch.undo()
    assert decoder(b"", str(tiny_model))(ids) == "1+1=2"


def test_without_a_tokenizer_nothing_is_decoded():
    with pytest.raises(ValueError, match="must come with its text"):
        decoder(b"", "")([1])
