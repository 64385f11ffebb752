"""A byte-level tokenizer of 256 bytes and four special tokens. Every text is encoded and decoded exactly."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
"""The token that ends a response (eos)."""
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END, TURN_START, TURN_END, PAD)
"""The special tokens, with ids 256 … 259."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""
"""Qwen's chat form, without tools and thinking."""


def build(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer. Ids 0 … 255 are byte values, ids above are special tokens.

    `max_length`: the model's context in tokens. A text becomes its UTF-8 bytes and nothing else: no prefix space, no
    begin-of-sequence token, no clean-up on decoding.
    """
    core = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def _byte_vocabulary() -> dict[str, int]:
    """For each byte, the printable character that stands for it in the byte-level pre-tokenizer (GPT-2's table), with
    the byte as its id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    standins = {chr(byte): byte for byte in printable}
    standins.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return standins
