"""The model's tokenizer, with the functions that rollouts need."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, cached_property, partial
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.errors import BadInput
from engine.model.shape import end_of_sequence_ids, read_shape
from engine.wire.verifier_messages import LoadTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LONGEST_CHARACTER = 4
"""Most tokens that are one character together, a byte each."""
HALF = "\ufffd"
"""What a decoder writes for a part of a character."""
NO_TEXT = ("bos_token", "eos_token", "pad_token")
"""The tokens that are not text of a response, by their names in transformers."""
SHOWN = 6
"""Most tokens of a reading in a message."""
ANSWER = "9182736450"
"""A text that no chat template itself contains, nor changes to upper case."""
UNKNOWN = "\U0010fffd"
"""A character that no text has."""
PATTERN = r'"String":\s*("(?:[^"\\]|\\.)*")'
"""A text in tokenizer.json that it replaces or splits off, as JSON."""
SAMPLE = (
    ' Hello world¦If f(x) <= 3; "so" (a, b] is {1/2}:¦50% of #4 & 7_8 ~ $\\frac{1}{2}$ @home.¦  two   three    spaces '
    "¦trailing   ¦a\tb\t\tc¦one\ntwo\n\nthree\n\n\n¦a \n b\r\n¦7 42 365 2024 31415 271828 1234567 1,234.50 x12y3 007"
    "¦I'll we're it's don't I'D WE'VE IT'S DON'T ’tis l’eau¦camelCase HTTPServer snake_case UPPER¦for(i=0;i<n;i++){}"
    "¦１２３ ٣٤ ४२¦e\u0301 é¦naïve Größe Łódź ñ İi ß¦Ελληνικά Русский עברית العربية فارسی"
    "¦हिन्दी বাংলা தமிழ்¦ไทย ខ្មែរ မြန်မာ ქართული հայերեն አማርኛ¦中文字，数学。漢字かなカナ한국어 中3文a"
    "¦🎉👩‍👩‍👧 🇩🇪 👍🏽¦▁ <s> [INST] <|x|> ###"
)
"""Texts, divided by ¦, on which two readings are compared: scripts, runs of digits, spaces, new lines, contractions."""


class TokenizerFile:
    """A tokenizer.json, as the library `tokenizers` reads it. It alone decides which ids a text has, and which text ids
    have: transformers builds some tokenizers anew from the name of their class, and would read text otherwise.
    transformers is asked for the chat template and the names of special tokens. Any thread may encode and decode."""

    def __init__(self, sent: LoadTokenizer) -> None:
        """Without a `json` in `sent`, nothing can be encoded, and `decode` raises ValueError."""
        self.for_verifiers = sent
        """A message from which another process makes the same tokenizer."""
        self._left_out = frozenset(sent.left_out)
        self._variables: Mapping[str, Any] = json.loads(sent.variables)
        self._file: Any = _open_json(sent.json) if sent.json else None
        self._pieces: dict[int, str] = {}
        """The texts of the tokens that `pieces` was asked for; at most the vocabulary."""

    @cached_property
    def _transformers(self) -> PreTrainedTokenizerBase:
        """The tokenizer of transformers. Loading it takes seconds."""
        return _load_transformers(Path(self.for_verifiers.folder))

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template, of several the one that is named "default"; None if there is none."""
        found: Any = self._transformers.chat_template
        return found.get("default") if isinstance(found, dict) else found

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without tokens that begin or end a sequence."""
        return list(self._file.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text."""
        return [one.ids for one in self._file.encode_batch(list(texts), add_special_tokens=False)]

    def one_token(self, text: str, key: str = "stop") -> int:
        """Return the id of a text that is one token. Raises BadInput for any other, which names `key`."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise BadInput(f"{key} {text!r} is {len(ids)} tokens of this tokenizer; it must be one")
        return ids[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response: everything that the model wrote, including special tokens (`<think>`), without
        those that begin, end or fill a sequence or end a turn."""
        if self._file is None:
            raise ValueError("there is no tokenizer, so a response must come with its text")
        kept = [one for one in ids if one not in self._left_out]
        return str(self._file.decode(kept, skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Tokens that are parts of one character have the text "", but for the last of
        them."""
        before = self.encode("a")[-1:]  # else some decoders leave out the first token's space
        skipped = len(self._file.decode(before, skip_special_tokens=False))
        known = self._pieces
        if new := list({*ids} - known.keys()):
            found = self._file.decode_batch([[*before, one] for one in new], skip_special_tokens=False)
            known.update(zip(new, (text[skipped:] for text in found), strict=True))
        texts = [known[one] for one in ids]
        for end, text in enumerate(texts):
            for first in range(end - 1, max(-1, end - LONGEST_CHARACTER), -1):
                if HALF not in text or HALF not in texts[first]:
                    break
                whole = self._file.decode([*before, *ids[first : end + 1]], skip_special_tokens=False)[skipped:]
                if HALF not in whole:
                    texts[first : end + 1] = [*[""] * (end - first), whole]
                    break
        return texts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        clock: datetime | None = None,
        *,
        begins_answer: bool = True,
    ) -> str:
        """Put messages into the chat template. With `begins_answer`, the start of an answer follows them.

        `variables`: the template's own, besides those that were sent. `clock`: the time given to a template that asks
        for it (`strftime_now`); None: the present. Raises BadInput if the template does not parse, or fails on these
        messages.
        """
        from jinja2 import TemplateError

        # `apply_chat_template` does the same, but passes no function to the template, and so no clock.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        owner = self.for_verifiers.folder or "the tokenizer"
        if not self.chat_template:
            raise BadInput(f"{owner} has no chat template (chat_template.jinja)")
        named = self._transformers.special_tokens_map
        given = {"tools": None, "documents": None, **named, **self._variables, **variables}
        if clock is not None:
            given["strftime_now"] = clock.strftime
        try:
            template = _compile_jinja_template(self.chat_template)
            return str(template.render(messages=messages, add_generation_prompt=begins_answer, **given))
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadInput(f"the chat template of {owner} fails: {type(error).__name__}: {error}") from None

    def added_tokens(self) -> Mapping[str, int]:
        """The special tokens, and others that the file lists by themselves: their texts with their ids. White space is
        none of them."""
        found = self._file.get_added_tokens_decoder().items()
        return {one.content: key for key, one in found if one.content.strip()}

    def compare(self, encode: Callable[[str], Sequence[int]], reader: str, tokens: Iterable[str] = ()) -> str:
        """Return a sentence that names the first text that `encode` reads otherwise, and both readings; "" if it reads
        SAMPLE, `_characters`, each added token and each text that it replaces or splits off as the file does. `reader`:
        its name. `tokens`: further texts to compare."""
        rules = map(json.loads, re.findall(PATTERN, self.for_verifiers.json.decode()))
        each = [*self.added_tokens(), *tokens, *rules]
        pieces = [*SAMPLE.split("¦"), *(text for one in each for text in (one, f"a{one}b", f" {one}\n1"))]
        for text in (*pieces, "".join(pieces), *_characters()):
            ours = self.encode(text)
            theirs = list(encode(text))
            if ours != theirs:
                first = len(commonprefix((ours, theirs)))
                shown = [[self._file.id_to_token(one) or one for one in ids[first:][:SHOWN]] for ids in (theirs, ours)]
                piece = text if text in pieces else self._file.decode(ours[first:][:SHOWN])
                place = f" (from its token {first})" if first else ""
                return f"{reader} reads {piece!r} as {shown[0]}, tokenizer.json as {shown[1]}{place}"
        return ""


class Tokenizer(TokenizerFile):
    """The tokenizer of a model folder. It never runs code that comes with a model."""

    def __init__(
        self,
        model: Path,
        stop: Sequence[str] = (),
        prompt_template: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`stop`: as `rollout.stop`. `prompt_template`: as `data.prompt_template`. `variables`: the chat template's, as
        `data.chat_template_kwargs`. Raises BadInput if the folder has no tokenizer, or if a text in `stop` is not a
        single token."""
        made = self._transformers = _load_transformers(model)
        super().__init__(LoadTokenizer(json=_read_json(model, made), folder=str(model)))
        special = {self._file.token_to_id(text): text for text in made.all_special_tokens}
        special |= {key: one.content for key, one in self._file.get_added_tokens_decoder().items() if one.special}
        unknown = self.encode(UNKNOWN)
        self.special: Mapping[int, str] = {key: text for key, text in special.items() if key not in unknown}
        """The special tokens, their ids with their texts, without the one that stands for what is no token."""
        self.after_a_turn = self._after_a_turn(variables or {})
        """What the chat template writes after an answer; "" if it does not accept a plain chat."""
        known = {*special, *self.added_tokens().values()}
        turns = self.turn_ends = [one for one in self.encode(self.after_a_turn) if one in known]
        """The added tokens in it, special or not."""
        stops = [self.one_token(text, "rollout.stop") for text in stop]
        texts = made.special_tokens_map
        named = {name: self._file.token_to_id(texts[name]) for name in NO_TEXT if name in texts}
        marks = {*self.encode(prompt_template)} & {*self.special, *turns} - {*named.values()}
        self.has_turns = prompt_template == "chat" or bool(marks)
        """Whether prompts have turns: they are written in the chat template, or have tokens that a template has."""
        ends = turns if self.has_turns else []
        self.stop_ids = tuple(dict.fromkeys(one for one in (named.get("eos_token"), *ends, *stops) if one is not None))
        """The ids of the end of sequence, of `stop`, and of what ends a turn in the chat template, if prompts have
        turns."""
        of_turns = turns if made.chat_template else set(stops) & special.keys()
        left_out = {*named.values(), *end_of_sequence_ids(model), *of_turns} - {None}
        self.for_verifiers = msgspec.structs.replace(self.for_verifiers, left_out=tuple(sorted(left_out)))
        self._left_out = frozenset(left_out)

    def vocabulary(self) -> int:
        """Number of tokens of the model in this folder. Raises BadInput if its config.json does not say."""
        return read_shape(Path(self.for_verifiers.folder), weights=False).vocabulary

    def compare_transformers(self) -> str:
        """Return what `compare` finds in the reading of transformers."""
        made = self._transformers
        read = partial(made.encode, add_special_tokens=False, verbose=False)
        return self.compare(read, f"transformers ({type(made).__name__})", made.get_added_vocab())

    def lost_tokens(self, texts: Iterable[str]) -> list[str]:
        """Return the tokens in texts that transformers adds and tokenizer.json does not have."""
        lost = self._transformers.get_added_vocab().keys() - self.added_tokens().keys()
        return sorted({one for text in texts for one in lost if one in text})

    def _after_a_turn(self, variables: Mapping[str, Any]) -> str:
        turns = [
            {"role": role, "content": text} for role, text in (("system", "."), ("user", "1+1="), ("assistant", ANSWER))
        ]
        for said in (turns[1:], turns):  # some templates need a system message, others refuse one
            with suppress(BadInput):  # the users of the template report this
                text = self.render(said, variables, begins_answer=False)
                return text.rpartition(ANSWER)[2] if ANSWER in text else ""
        return ""


@cache
def _characters() -> list[str]:
    """Return texts with all characters but letters without case that no normalizer changes."""
    kinds = ((one, unicodedata.category(one)) for one in map(chr, range(0x30000)))  # ideographs follow
    kept = [
        one
        for one, kind in kinds
        if kind not in ("Cn", "Co", "Cs") and (kind != "Lo" or not unicodedata.is_normalized("NFKC", one))
    ]
    return ["a".join(kept[first : first + 512]) for first in range(0, len(kept), 512)]


def _load_transformers(model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # takes seconds, during which the processes of a run can start

    try:
        made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # noqa: BLE001 - of damaged files the libraries raise anything, `tokenizers` a bare one
        why = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        raise BadInput(f"model.path {model}: AutoTokenizer can't load a tokenizer there: {why}") from None
    files = ("tokenizer.json", *made.vocab_files_names.values())
    if not any((model / name).is_file() for name in files):  # transformers would build one without a vocabulary
        raise BadInput(f"model.path {model}: AutoTokenizer can't load a tokenizer there: it has no {files[0]}")
    return made


def _read_json(model: Path, made: PreTrainedTokenizerBase) -> bytes:
    """Return tokenizer.json; in a folder without one, what transformers converts its files to. Raises BadInput if it
    does not convert them."""
    if (model / "tokenizer.json").is_file():
        return (model / "tokenizer.json").read_bytes()
    if (backend := getattr(made, "backend_tokenizer", None)) is None:
        kind = type(made).__name__
        raise BadInput(
            f"model.path {model}: it has no tokenizer.json, and transformers ({kind}) makes none of its files"
        )
    return str(backend.to_str()).encode()


def _open_json(json: bytes) -> Any:  # noqa: ANN401
    """Return a tokenizer of the library `tokenizers` that neither cuts nor fills texts, nor merges at random."""
    from tokenizers import Tokenizer as Fast

    found = Fast.from_str(json.decode())
    found.no_truncation()
    found.no_padding()
    if getattr(found.model, "dropout", None):
        found.model.dropout = None
    return found
