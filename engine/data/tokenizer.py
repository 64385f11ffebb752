"""The model's tokenizer, with the functions that rollouts need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """The tokenizer of a model folder. It never runs code that comes with a model."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer  # takes seconds, during which the processes of a run can start

        try:
            self.hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise BadInput(f"model.path {model}: no tokenizer that AutoTokenizer can load there: {error}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.hf.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """The ids of `rollout.stop` and of the end of sequence. Raises BadInput for a string that is not one token."""
        ids = [] if self.hf.eos_token_id is None else [self.hf.eos_token_id]
        for text in stop:
            encoded = self.hf.encode(text, add_special_tokens=False)
            if len(encoded) != 1:
                raise BadInput(f"rollout.stop {text!r} is {len(encoded)} tokens of this tokenizer; it must be one")
            ids += encoded
        return tuple(ids)
