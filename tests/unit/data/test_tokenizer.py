"""The text of token ids is the same wherever it is decoded: in the orchestrator, and in a verifier process."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast
from transformers import AutoTokenizer

from engine.config.inputs import Data
from engine.data.problems import ProblemRow, Problems
from engine.data.prompts import count_typed_tokens, encode_problems
from engine.data.tokenizer import Tokenizer, TokenizerFile
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

    def save(end=None, template=QWEN, eot=False, **named):
        made = byte_tokenizer(256)
        made.chat_template = template
        made.add_special_tokens({"extra_special_tokens": [*made.extra_special_tokens, *TAGS], **named})
        made.add_tokens(["<eot>"] if eot else [])  # not special
        made.save_pretrained(tmp_path)
        if end is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        return tmp_path

    return save


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.integers(0, 259), max_size=12))  # halves of characters and special tokens, too
def test_every_way_to_decode_gives_the_text_of_transformers(tokenizer, ids):
    kept = [one for one in ids if one not in (256, 258, 259)]  # ends of sequence and turn, padding
    expected = byte_tokenizer(256).decode(kept, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(tuple(ids)) == TokenizerFile(tokenizer.for_verifiers).decode(ids) == expected


def test_special_tokens_that_the_model_wrote_are_text(tagged):
    text = "<think>2+2</think><answer>4</answer>"
    tokenizer = Tokenizer(tagged())
    ids = tokenizer.encode(text)
    assert set(ids) & set(tokenizer.added_tokens().values())
    for decode in (tokenizer.decode, TokenizerFile(tokenizer.for_verifiers).decode):
        assert decode([*ids, *tokenizer.stop_ids]) == text


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
    assert tokenizer.decode(tokenizer.encode(ALL)) == expected


def test_a_stop_of_several_tokens_is_refused_and_others_are_known_by_their_ids(tagged):
    folder = tagged()
    assert Tokenizer(folder, ("#", "</answer>")).stop_ids == (256, ord("#"), 263)
    with pytest.raises(BadInput, match=r"rollout.stop 'ab' is 2 tokens"):
        Tokenizer(folder, ("ab",))


def test_without_a_tokenizer_nothing_is_decoded():
    with pytest.raises(ValueError, match="must come with its text"):
        TokenizerFile(LoadTokenizer()).decode([1])


def test_the_pieces_of_a_text_are_its_tokens_and_a_character_of_several_is_whole(tokenizer):
    text = " 2+2 is 四, naïve \U0001f389"
    ids = tokenizer.encode(text)
    for _ in range(2):  # the second time they are known
        pieces = tokenizer.pieces(ids)
        assert "".join(pieces) == text
        assert len(pieces) == len(ids)
    assert "\U0001f389" in pieces
    assert tokenizer.pieces([*b"a", 0xE5]) == ["a", "\ufffd"]  # cut within a character


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(*patterns):
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(one), "isolated") for one in patterns), BYTES])


KINDS = {
    "three digits": (None, split(LLAMA3)),
    "single digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])),
    "characters of Chinese": (None, split(r"[\r\n]", r"\s?[A-Za-z]+", r"\s+$", r"[一-龥]+")),
    "composed": (normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a space first": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "Llama 2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "no space first": (None, pre_tokenizers.Metaspace("▁", "never", False)),
}
TEXT = "we  need 1234567 and 6'LL\n\n then  stop. ΑΩ e\u0301 ﬁ <|im_start|>user\n中文字 42<|im_end|>"


@pytest.fixture(scope="module")
def trained():
    """A small tokenizer of each kind."""

    def made(kind):
        normalizer, splitter = KINDS[kind]
        bytewise = kind not in ("Llama 2", "no space first")
        found = Fast(models.BPE() if bytewise else models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if normalizer is not None:
            found.normalizer = normalizer
        if splitter is not None:
            found.pre_tokenizer = splitter
        fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        found.decoder = decoders.ByteLevel() if bytewise else fallback
        special = ["<unk>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
        special += [] if bytewise else [f"<0x{one:02X}>" for one in range(256)]
        alphabet = pre_tokenizers.ByteLevel.alphabet() if bytewise else []
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        found.train_from_iterator([TEXT * 20, "1234567 123 456 'll 'LL need stop 中文 \n\n é " * 50], trainer)
        return found

    return {kind: made(kind) for kind in KINDS}


def save_tokenizer(folder, file, name, kind, **settings):
    """A model folder with a tokenizer.json, and the name of a class of transformers."""
    file.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": name, "eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "named", [("Qwen2Tokenizer", "llama"), ("GPT2Tokenizer", "qwen3"), ("LlamaTokenizer", "llama"), ("", "qwen2")]
)
def test_ids_are_those_of_the_file_whatever_class_is_named(tmp_path, trained, kind, named):
    name, model = named
    folder = save_tokenizer(tmp_path, trained[kind], name or "PreTrainedTokenizerFast", model)
    tokenizer = Tokenizer(folder)
    expected = trained[kind].encode(TEXT, add_special_tokens=False).ids
    for one in (tokenizer, TokenizerFile(tokenizer.for_verifiers)):  # in an orchestrator, in a verifier
        assert one.encode(TEXT) == expected
        assert one.encode_all(["6'LL", TEXT]) == [trained[kind].encode("6'LL").ids, expected]
        assert one.decode(expected) == trained[kind].decode(expected, skip_special_tokens=False)
    theirs = AutoTokenizer.from_pretrained(folder).encode(TEXT, add_special_tokens=False)
    difference = tokenizer.compare_transformers()
    assert difference or theirs == expected
    if difference:
        assert re.fullmatch(r"transformers \(\w+\) reads '.+' as \[.+\], tokenizer\.json as \[.+\].*", difference)


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_two_equal_readings_are_not_told_apart(tmp_path, trained, name):
    assert Tokenizer(save_tokenizer(tmp_path, trained["three digits"], name, "llama")).compare_transformers() == ""


def test_what_cuts_or_fills_texts_in_the_file_does_neither(tmp_path, trained):
    file = Fast.from_str(trained["three digits"].to_str())
    file.model.dropout = 0.5
    file.enable_truncation(3)
    file.enable_padding(length=64)
    tokenizer = Tokenizer(save_tokenizer(tmp_path, file, "PreTrainedTokenizerFast", "llama"))
    expected = trained["three digits"].encode(TEXT).ids
    for one in (tokenizer, TokenizerFile(tokenizer.for_verifiers)):
        assert one.encode_all([TEXT, "a"])[0] == one.encode(TEXT) == expected


def test_the_first_text_of_another_reading_is_named(tokenizer):
    def read(text):
        return [one for one in tokenizer.encode(text) if one != ord("'")]

    expected = """another reads "I'll .*" as \\['l', .*\\], tokenizer.json as \\["'", 'l', .*\\(from its token 1\\)"""
    assert re.match(expected, tokenizer.compare(read, "another"))
    assert tokenizer.compare(tokenizer.encode, "the same") == ""
    near = {"it eats spaces": (" <|pad|>", "<|pad|>"), "it drops": ("a<|pad|>b", "ab")}
    for reader, change in near.items():
        assert "pad" in tokenizer.compare(lambda text, change=change: tokenizer.encode(text.replace(*change)), reader)
    assert "it cuts reads" in tokenizer.compare(lambda text: tokenizer.encode(text)[:200], "it cuts")
    for lost in tokenizer.added_tokens().values():
        assert tokenizer.compare(lambda text, lost=lost: [one for one in tokenizer.encode(text) if one != lost], "it")


def test_a_token_that_only_transformers_adds_is_known(tmp_path, trained):
    added = {"9000": {"content": "<|turn|>", "special": True}}
    tokenizer = Tokenizer(
        save_tokenizer(tmp_path, trained["three digits"], "TokenizersBackend", "llama", added_tokens_decoder=added)
    )
    assert "'<|turn|>'" in tokenizer.compare_transformers()
    assert tokenizer.lost_tokens(["a<|im_end|>", "a<|turn|>b<|im_end|>"]) == ["<|turn|>"]
    assert tokenizer.lost_tokens(["a<|im_end|>"]) == []


@pytest.mark.parametrize("sign", ["×", "÷", "…", "“", "°", "½", "㎏", "ё", "🙂", "千"])
def test_what_the_file_replaces_is_compared(tmp_path, sign):
    """千 is no sign, and no normalizer of Unicode changes it: only the file itself tells of it."""
    Tokenizer(save_tokenizer(tmp_path, byte_tokenizer(256).backend_tokenizer, "TokenizersBackend", "llama"))
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["normalizer"] = {"type": "Replace", "pattern": {"String": sign}, "content": "*"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    told = Tokenizer(tmp_path).compare(byte_tokenizer(256).encode, "another")
    assert re.match(rf"another reads '{sign}' as .*, tokenizer\.json as \['\*'\]", told)


@pytest.mark.parametrize("sign", ["×", "÷", "…", "“", "°", "½", "㎏", "ё", "Ⅷ", "\u200b", "\u0301"])
def test_a_reader_that_replaces_a_sign_is_told_apart(tokenizer, sign):
    assert "another reads" in tokenizer.compare(lambda text: tokenizer.encode(text.replace(sign, "*")), "another")


def test_a_folder_without_a_tokenizer_json_has_what_transformers_makes_of_its_files(tmp_path, trained, monkeypatch):
    trained["composed"].model.save(str(tmp_path))
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = Tokenizer(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path).encode(TEXT)
    assert tokenizer.encode(TEXT) == TokenizerFile(tokenizer.for_verifiers).encode(TEXT) == expected
    monkeypatch.setattr("transformers.TokenizersBackend.backend_tokenizer", None)
    with pytest.raises(BadInput, match=r"it has no tokenizer\.json, and transformers \(Qwen2Tokenizer\) makes none"):
        Tokenizer(tmp_path)


WRITTEN = "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompts", "saved", "ends"),
    [
        ("chat", {}, (256, 258)),
        (WRITTEN, {}, (256, 258)),  # the template written out
        ("{problem}", {}, (256,)),
        ("chat", {"eos_token": "<|im_end|>"}, (258,)),
        ("chat", {"template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}, (256,)),
        ("chat", {"template": "{{ raise_exception('no') }}"}, (256,)),
        ("<|im_start|>user\n{problem}\n<|im_start|>assistant\n", {}, (256, 258)),  # without the end of the user's turn
        ("<|endoftext|>{problem}", {}, (256,)),  # no turn
        ("chat", {"template": "{{ messages[1].content | upper }}<|im_end|>"}, (256, 258)),
        ("chat", {"template": "{{ messages[1].content }}<eot>\n<|endoftext|>", "eot": True}, (256, 264)),
        ("chat", {"template": "{{ messages[1].content + mode[:0] }}<|im_end|>"}, (256, 258)),  # it wants a variable
        ("chat", {"template": "{{ messages[2].content }}<|im_end|>"}, (256, 258)),  # it wants a system message
    ],
)
def test_the_end_of_a_turn_ends_a_response_to_a_prompt_with_turns(tagged, prompts, saved, ends):
    tokenizer = Tokenizer(tagged(**saved), prompt_template=prompts, variables={"mode": "quick"})
    assert tokenizer.stop_ids == ends


def test_a_token_that_only_the_file_calls_special_ends_a_turn(tagged):
    folder = tagged()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["extra_special_tokens"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer(folder, prompt_template="chat").stop_ids == (256, 258)


TYPED = [
    ("plain words", "chat", False),
    ("a<|im_end|>b", "chat", True),
    ("say <|IM_END|>", "chat", True),  # the file lowers the case
    ([{"role": "assistant", "reasoning": "x<|pad|>"}, {"role": "user", "content": "r"}], "chat", True),
    ([{"role": "assistant", "unread": "x<|pad|>"}, {"role": "user", "content": "r"}], "chat", False),
    ([{"role": "assistant", "calls": [{"arguments": "<|im_end|>"}]}, {"role": "user", "content": "r"}], "chat", True),
    ("3 pineapples", "chat", False),  # "apple" is an added token, but not special
    ("4 pearls, 3 pears", "chat", False),  # "pear" is special, as a word of its own
    ("a pear", "chat", True),
    ("pear", "chat", True),
    ("end|> 1+1", "<|im_{problem}", True),  # half in the template
    ("1+1", "<|im_start|>{problem}<|im_end|>", False),
    ("1+1<|im_end|>", "<|im_start|>{problem}<|im_end|>", True),
    ("Ж", "chat", False),
]
READS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.reasoning }}"
    "{% if m.calls %}{{ m.calls[0].arguments }}{% endif %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(("problem", "template", "typed"), TYPED)
def test_special_tokens_typed_in_a_problem_are_those_of_the_file(tagged, problem, template, typed):
    folder = tagged(template=READS)
    file = json.loads((folder / "tokenizer.json").read_text())
    file["normalizer"] = {"type": "Lowercase"}
    first = file["added_tokens"][0] | {"normalized": False, "single_word": True}
    file["added_tokens"] = [one | {"normalized": True} for one in file["added_tokens"]]
    file["added_tokens"] += [first | {"id": 264, "content": "apple", "special": False, "single_word": False}]
    file["added_tokens"] += [first | {"id": 265, "content": "pear", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps(file))
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64, "vocab_size": 266}
    (folder / "config.json").write_text(json.dumps(shape | sizes))
    messages = () if isinstance(problem, str) else tuple(problem)
    row = ProblemRow(str(problem), "2", {"problem": problem, "answer": "2"}, messages=messages)
    tokenizer, data = Tokenizer(folder), Data(prompt_template=template)
    prompts = encode_problems(Problems((row,), {}, "", ""), tokenizer, data, 512).prompts
    assert count_typed_tokens([row], prompts, tokenizer, data).total() == typed
