"""Text of a response while it is sampled, token by token, up to its first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from engine.data.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of an incomplete character are decoded to."""


class Detokenizer:
    """Decodes the tokens of one response. What it gives, put together, is the response's text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """`stop`: strings that end the text and are no part of it."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._begin = 0  # tokens from here on are decoded again, because a token's text depends on the one before
        self._read = 0  # tokens before this one are in the text
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self.stopped = False
        """Whether a stop string came; then nothing more belongs to the text."""

    def add(self, token: int) -> str:
        """Return the text that is certain with this token; "" while a character or a stop string is incomplete."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        now = self._tokenizer.decode(self._ids[self._begin :])
        if len(now) <= len(before) or now.endswith(BROKEN):
            return ""
        self._begin = self._read
        self._read = len(self._ids)
        return self._up_to_stop(now[len(before) :])

    def end(self) -> str:
        """Return the rest of the text, when no token follows."""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        rest = self._tokenizer.decode(self._ids[self._begin :])[len(before) :]
        text = self._up_to_stop(rest)
        held = "" if self.stopped else self._held
        self._held = ""
        return text + held

    def _up_to_stop(self, more: str) -> str:
        """Return what is certain of the text with `more`, and hold back what may begin a stop string."""
        text = self._held + more
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if self.stopped or found:
            certain = "" if self.stopped else text[: min(found)]
            self.stopped = True
            self._held = ""
            return certain
        begun = [length for stop in self._stop for length in range(1, len(stop)) if text.endswith(stop[:length])]
        kept = max(begun, default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]
