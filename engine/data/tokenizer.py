"""The model's tokenizer, as far as rollouts need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer:
    """Loads the tokenizer of a model folder; never runs code that comes with a model."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer  # seconds, in which the processes of a run can start

        try:
            self.hf: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                model, trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise BadInput(f"model.path {model}: no tokenizer that AutoTokenizer can load there: {error}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a response, special tokens left out."""
        return self.hf.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Ids of `rollout.stop`, beside the end of sequence. Raises BadInput for a string that is not one token."""
        ids = [] if self.hf.eos_token_id is None else [self.hf.eos_token_id]
        for text in stop:
            encoded = self.hf.encode(text, add_special_tokens=False)
            if len(encoded) != 1:
                raise BadInput(f"rollout.stop {text!r} is {len(encoded)} tokens of this tokenizer; it must be one")
            ids += encoded
        return tuple(ids)
