"""Turns problems into prompts: fills the template, encodes the text, and leaves out prompts that cannot be used."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from engine.data.problems import ProblemRow, Problems, format_counts
from engine.data.tokenizer import render_chat
from engine.errors import BadInput
from engine.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of a problem set, in its order."""

    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]
    """Reason → number of rows left out, during reading ("no answer" …) or here ("duplicate", "over-long", "no
    token")."""


def encode_problems(
    problems: Problems,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_context: int,
    *,
    vocabulary: int | None = None,
    clock: datetime | None = None,
) -> EncodedPrompts:
    """Put every problem into the template and tokenize it.

    `template` is a text with `{problem}`, to which no special tokens are added, or "chat" for the tokenizer's chat
    template with one user message. `max_context` is the limit of prompt and response together, in tokens. `vocabulary`
    is the number of tokens that the model has; None if there is no model yet. `clock` is the time given to a chat
    template that asks for it; None: the present. Raises BadInput if no prompt is left, if a prompt has a token that the
    model lacks, or if the tokenizer has no chat template, or one that fails.
    """
    if template == "chat" and not tokenizer.chat_template:
        raise BadInput(
            'data.prompt_template = "chat": the tokenizer has no chat template; '
            "give a text with {problem} in it instead"
        )
    rows: dict[str, ProblemRow] = {}
    for row in problems.rows:
        rows.setdefault(prompt_id(row.problem, row.answer), row)  # the first of duplicates is kept
    if template == "chat":
        texts = [_chat(tokenizer, row.problem, clock, problems.source) for row in rows.values()]
    else:  # not str.format, because problems and templates contain braces
        texts = [template.replace("{problem}", row.problem) for row in rows.values()]
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    prompts, skipped = _fitting(rows, texts, ids, max_context)
    skipped.update(problems.skipped)
    skipped["duplicate"] += len(problems.rows) - len(rows)
    skipped = +skipped  # removes zeros
    if not prompts:
        raise BadInput(
            f"problem set {problems.source}: no prompt is left of {len(problems.rows)} rows "
            f"({format_counts(skipped)}); rollout.max_context is {max_context} tokens"
        )
    if vocabulary is not None:
        _check_ids(prompts, vocabulary, problems.source)
    return EncodedPrompts(tuple(prompts), dict(skipped))


def _check_ids(prompts: Sequence[Prompt], vocabulary: int, source: str) -> None:
    for prompt in prompts:
        if (largest := max(prompt.token_ids)) >= vocabulary:
            raise BadInput(
                f"model.path: its tokenizer gives token {largest} in the prompt {prompt.problem[:60]!r} of {source}, "
                f"but the model's vocab_size is {vocabulary}; use the tokenizer that belongs to the model"
            )


def prompt_id(problem: str, answer: str) -> str:
    """16 hex digits of SHA-256 over problem, a zero byte, and answer."""
    return hashlib.sha256(f"{problem}\0{answer}".encode()).hexdigest()[:16]


def _chat(tokenizer: PreTrainedTokenizerBase, problem: str, clock: datetime | None, source: str) -> str:
    try:
        return render_chat(tokenizer, [{"role": "user", "content": problem}], {}, clock)
    except BadInput as error:
        raise BadInput(
            f'data.prompt_template = "chat": {error} (for the problem {problem[:60]!r} of {source}); fix the '
            "template, or give a text with {problem} in it instead"
        ) from None


def _fitting(
    rows: Mapping[str, ProblemRow], texts: Sequence[str], ids: Sequence[Sequence[int]], max_context: int
) -> tuple[list[Prompt], Counter[str]]:
    prompts: list[Prompt] = []
    skipped: Counter[str] = Counter()
    for (key, row), text, tokens in zip(rows.items(), texts, ids, strict=True):
        if not tokens:
            skipped["no token"] += 1
        elif len(tokens) >= max_context:
            skipped["over-long"] += 1
        else:
            prompts.append(
                Prompt(
                    id=key,
                    problem=row.problem,
                    answer=row.answer,
                    token_ids=tuple(tokens),
                    columns=row.columns,
                    text=text,
                )
            )
    return prompts, skipped
