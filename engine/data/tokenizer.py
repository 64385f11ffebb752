"""The model's tokenizer, with the functions that rollouts need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadInput
from engine.model.shape import read_shape
from engine.wire.codec import Decode
from engine.wire.verifier_messages import LoadTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """The tokenizer of a model folder. It never runs code that comes with a model."""

    def __init__(self, model: Path) -> None:
        self._model = model
        from transformers import AutoTokenizer  # takes seconds, during which the processes of a run can start

        try:
            self.hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise BadInput(f"model.path {model}: no tokenizer that AutoTokenizer can load there: {error}") from None
        files = ("tokenizer.json", *self.hf.vocab_files_names.values())
        if not any((model / name).is_file() for name in files):  # transformers then makes one that knows no text
            raise BadInput(f"model.path {model}: no tokenizer that AutoTokenizer can load there: it has no {files[0]}")
        fast = getattr(self.hf, "backend_tokenizer", None)
        self.for_verifiers = LoadTokenizer(json=fast.to_str().encode()) if fast else LoadTokenizer(model=str(model))
        """From which a verifier process gets the same texts as `decode`."""
        self.decode: Decode = decoder(self.for_verifiers.json, self.for_verifiers.model)
        """Gives the text of a response, without special tokens. Any thread may call it: its tokenizer is another object
        than `hf`, which can't be used while it encodes."""

    def vocabulary(self) -> int:
        """Number of tokens that the model of this folder has. Raises BadInput if its config.json does not say."""
        return read_shape(self._model, weights=False).vocabulary

    def stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """The ids of `rollout.stop` and of the end of sequence. Raises BadInput for a string that is not one token."""
        ids = [] if self.hf.eos_token_id is None else [self.hf.eos_token_id]
        for text in stop:
            encoded = self.hf.encode(text, add_special_tokens=False)
            if len(encoded) != 1:
                raise BadInput(f"rollout.stop {text!r} is {len(encoded)} tokens of this tokenizer; it must be one")
            ids += encoded
        return tuple(ids)


def decoder(json: bytes, model: str) -> Decode:
    """Return the function that gives the text of token ids, without special tokens, of the tokenizer in `json` (as the
    library `tokenizers` writes it), else of the one in the folder `model`."""
    if json:
        from tokenizers import Tokenizer as FastTokenizer

        fast = FastTokenizer.from_str(json.decode())
        return lambda token_ids: fast.decode(list(token_ids), skip_special_tokens=True)
    if not model:
        return _refuse
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model, trust_remote_code=False, local_files_only=True)
    return lambda token_ids: slow.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _refuse(token_ids: Sequence[int]) -> str:
    raise ValueError("there is no tokenizer, so a response must come with its text")
