"""The model's tokenizer, with the functions that rollouts need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import BadInput
from engine.model.shape import end_of_sequence_ids, read_shape
from engine.wire.columns import Decode
from engine.wire.verifier_messages import LoadTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Pieces = Callable[[Sequence[int]], list[str]]
"""Returns the text of each of some token ids."""
LONGEST_CHARACTER = 4
"""Most tokens that are one character together, a byte each."""
HALF = "\ufffd"
"""What a decoder writes for a part of a character."""
NO_TEXT = ("bos_token", "eos_token", "pad_token")
"""The tokens that are not text of a response, by their names in transformers."""
ANSWER = "metronome"
"""A text that no chat template itself contains."""


class Tokenizer:
    """The tokenizer of a model folder. It never runs code that comes with a model."""

    def __init__(self, model: Path, stop: Sequence[str] = ()) -> None:
        """`stop`: as `rollout.stop`. Raises BadInput if the folder has no tokenizer, or if a text in `stop` is not a
        single token."""
        self._model = model
        from transformers import AutoTokenizer  # takes seconds, during which the processes of a run can start

        try:
            self.hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise BadInput(f"model.path {model}: AutoTokenizer can't load a tokenizer there: {error}") from None
        files = ("tokenizer.json", *self.hf.vocab_files_names.values())
        if not any((model / name).is_file() for name in files):  # transformers would build one without a vocabulary
            raise BadInput(f"model.path {model}: AutoTokenizer can't load a tokenizer there: it has no {files[0]}")
        stops = tuple(map(self._one_token, stop))
        end = self.hf.eos_token_id
        self.stop_ids = stops if end is None else (end, *stops)
        """The ids of the end of sequence and of `stop`."""
        fast = getattr(self.hf, "backend_tokenizer", None)
        self.for_verifiers = LoadTokenizer(
            json=fast.to_str().encode() if fast else b"",
            model="" if fast else str(model),
            left_out=self._left_out(stops),
            folder=str(model),
        )
        """A message from which a verifier process builds the same decoder as `decode`."""
        self.decode: Decode = make_decoder(self.for_verifiers)
        """Returns the text of a response: everything that the model wrote, including special tokens (`<think>`),
        without those that begin, end or fill a sequence or end a turn. Any thread may call it, because it does not use
        `hf`, which cannot be used while it encodes."""
        self.pieces: Pieces | None = make_pieces(self.for_verifiers)
        """Returns the text of each token; None if the tokenizer has no tokenizer.json. Any thread may call it."""

    def vocabulary(self) -> int:
        """Number of tokens of the model in this folder. Raises BadInput if its config.json does not say."""
        return read_shape(self._model, weights=False).vocabulary

    def _one_token(self, text: str) -> int:
        ids: list[int] = self.hf.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise BadInput(f"rollout.stop {text!r} is {len(ids)} tokens of this tokenizer; it must be one")
        return ids[0]

    def _left_out(self, stops: Sequence[int]) -> tuple[int, ...]:
        """The tokens that are not text of a response: begin, end and padding of the tokenizer, the model's ends of
        sequence, and the special tokens that end a turn (those of the chat template, or without one those in `stops`).
        """
        named = [text for name, text in self.hf.special_tokens_map.items() if name in NO_TEXT]
        turns = set(self.hf.all_special_ids) & set(self._after_a_turn() if self.hf.chat_template else stops)
        return tuple(sorted({*self.hf.convert_tokens_to_ids(named), *end_of_sequence_ids(self._model), *turns}))

    def _after_a_turn(self) -> Sequence[int]:
        """The tokens that the chat template writes after an answer; none if it does not accept a plain chat."""
        turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": ANSWER}]
        try:
            text = render_chat(self.hf, turns, {}, begins_answer=False)
        except BadInput:  # the users of the template report this
            return ()
        ids: list[int] = self.hf.encode(text.rpartition(ANSWER)[2] if ANSWER in text else "", add_special_tokens=False)
        return ids


def make_decoder(tokenizer: LoadTokenizer) -> Decode:
    """Return the function that gives the text of a response's token ids."""
    left_out = frozenset(tokenizer.left_out)
    if tokenizer.json:
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_str(tokenizer.json.decode())
        return lambda ids: fast.decode([one for one in ids if one not in left_out], skip_special_tokens=False)
    if not tokenizer.model:
        return _refuse
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(tokenizer.model, trust_remote_code=False, local_files_only=True)
    return lambda ids: slow.decode([one for one in ids if one not in left_out], clean_up_tokenization_spaces=False)


def make_pieces(tokenizer: LoadTokenizer) -> Pieces | None:
    """Return the function that gives the text of each token; None without a tokenizer.json. Tokens that are parts of
    one character have the text "", but for the last of them."""
    if not tokenizer.json:
        return None
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_str(tokenizer.json.decode())
    before = fast.encode("a", add_special_tokens=False).ids[-1:]  # else some decoders leave out the first token's space
    skipped = len(fast.decode(before, skip_special_tokens=False))
    known: dict[int, str] = {}
    """The texts of the tokens that were asked for; at most the vocabulary."""

    def pieces(ids: Sequence[int]) -> list[str]:
        if new := list({*ids} - known.keys()):
            found = fast.decode_batch([[*before, one] for one in new], skip_special_tokens=False)
            known.update(zip(new, (text[skipped:] for text in found), strict=True))
        texts = [known[one] for one in ids]
        for end, text in enumerate(texts):
            for first in range(end - 1, max(-1, end - LONGEST_CHARACTER), -1):
                if HALF not in text or HALF not in texts[first]:
                    break
                whole = fast.decode([*before, *ids[first : end + 1]], skip_special_tokens=False)[skipped:]
                if HALF not in whole:
                    texts[first : end + 1] = [*[""] * (end - first), whole]
                    break
        return texts

    return pieces


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    clock: datetime | None = None,
    *,
    begins_answer: bool = True,
) -> str:
    """Put messages into the tokenizer's chat template. With `begins_answer`, the start of an answer follows them.

    `variables`: the template's own. `clock`: the time given to a template that asks for it (`strftime_now`); None: the
    present. Raises BadInput if the template does not parse, or fails on these messages.
    """
    from jinja2 import TemplateError

    # `apply_chat_template` does the same, but passes no function to the template, and so no clock.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    given = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **variables}
    if clock is not None:
        given["strftime_now"] = clock.strftime
    try:
        template = _compile_jinja_template(tokenizer.get_chat_template())
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
        owner = tokenizer.name_or_path or "the tokenizer"
        raise BadInput(f"the chat template of {owner} fails: {type(error).__name__}: {error}") from None


def _refuse(token_ids: Sequence[int]) -> str:
    raise ValueError("there is no tokenizer, so a response must come with its text")
