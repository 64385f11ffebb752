"""Turns problems into prompts: fills the template, encodes the text, and leaves out prompts that cannot be used."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from os.path import commonprefix
from typing import Any

from engine.config.inputs import Data
from engine.data.problem_files import spell_value
from engine.data.problems import ProblemRow, Problems, format_counts
from engine.data.row_format import PLACEHOLDER, SYSTEM, column, has_column, is_placeholder, template_columns
from engine.data.tokenizer import ANSWER, Tokenizer
from engine.errors import BadInput
from engine.types import Prompt


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of a problem set, in its order."""

    prompts: tuple[Prompt, ...]
    skipped: Mapping[str, int]
    """Reason → number of rows left out, during reading ("no answer" …) or here ("duplicate", "over-long", "no
    token")."""
    parts: Mapping[int, int]
    """Number of a set in `data.train` → number of its prompts."""


def encode_problems(
    problems: Problems,
    tokenizer: Tokenizer,
    data: Data,
    max_context: int,
    *,
    clock: datetime | None = None,
) -> EncodedPrompts:
    """Put every problem into the template and tokenize it.

    `data`: has the template and what it adds. No special tokens are added to a text. `max_context` is the limit of
    prompt and response together, in tokens. `clock` is the time given to a chat template that asks for it; None: the
    present. Raises BadInput if no prompt is left, if a prompt has a token that the model lacks, if the tokenizer has no
    chat template, or one that fails, and like `check_template`.
    """
    check_template(problems, data)
    rows: dict[str, ProblemRow] = {}
    for row in problems.rows:
        rows.setdefault(prompt_id(row.identity, row.answer), row)  # the first of duplicates is kept
    texts = [_text(tokenizer, row, data, problems.source, clock) for row in rows.values()]
    fitting, skipped = _fitting(rows, texts, tokenizer.encode_all(texts), max_context)
    skipped.update(problems.skipped)
    skipped["duplicate"] += len(problems.rows) - len(rows)
    skipped = +skipped  # removes zeros
    prompts = [prompt for _, prompt in fitting]
    if not prompts:
        raise BadInput(
            f"problem set {problems.source}: no prompt is left of {len(problems.rows)} rows "
            f"({format_counts(skipped)}); rollout.max_context is {max_context} tokens"
        )
    _check_ids(prompts, tokenizer.vocabulary(), problems.source)
    return EncodedPrompts(tuple(prompts), dict(skipped), Counter(part for part, _ in fitting))


def check_template(problems: Problems, data: Data) -> None:
    """Raise BadInput if the template is a text, and a row is a conversation or lacks a column that the text names."""
    template = data.prompt_template
    if template == "chat":
        return
    if (row := next((row for row in problems.rows if row.messages), None)) is not None:
        raise BadInput(
            f"{row.where}: the problem is a list of messages, which only the tokenizer's chat template can render: set "
            'data.prompt_template = "chat", or name a column with a text in data.columns.problem (for example '
            '"prompt.0.content")'
        )
    for name in template_columns(template):
        values = ((one, column(one.columns, name)) for one in problems.rows)
        row = next((one for one, value in values if not isinstance(value, str | int | float) or value != value), None)
        if row is not None:
            what = "is no text or number" if has_column(row.columns, name) else "is no column"
            raise BadInput(
                f"data.prompt_template: {{{name}}} {what} of {row.where}, which has {', '.join(row.columns)}; write "
                f"{{{{{name}}}}} for the text {{{name}}} itself"
            )


def _text(tokenizer: Tokenizer, row: ProblemRow, data: Data, source: str, clock: datetime | None = None) -> str:
    chat = data.prompt_template == "chat"
    return _chat(tokenizer, row, data, clock, source) if chat else _fill(data.prompt_template, row)


def _fill(template: str, row: ProblemRow) -> str:
    """The template with its columns filled in. Not by str.format, because problems and templates contain braces."""

    def value(found: re.Match[str]) -> str:
        if not is_placeholder(found):
            return found[0] if found["command"] else f"{{{found['name']}}}"
        text = row.problem if found["name"] == "problem" else spell_value(column(row.columns, found["name"]))
        return f"{found['command'] or ''}{found['open']}{text}{found['close']}"

    return PLACEHOLDER.sub(value, template)


def count_typed_tokens(
    rows: Sequence[ProblemRow], prompts: Sequence[Prompt], tokenizer: Tokenizer, data: Data
) -> Counter[str]:
    """Count the prompts of these rows into which their row brings a special token (`<|im_end|>`), by the first such
    token: they have more of it than the same prompt with a point for each text of the row."""

    def count(ids: Sequence[int]) -> Counter[int]:
        return Counter(one for one in ids if one in tokenizer.special)

    def neutral(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Mapping):
            return {key: neutral(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [neutral(inner) for inner in value]
        word = not isinstance(value, str) or re.fullmatch(r"\w*", value)  # templates ask for roles, kinds and names
        return value if word and not count(tokenizer.encode(str(value))) else "."

    found: Counter[str] = Counter()
    known = {prompt_id(row.identity, row.answer): row for row in reversed(rows)}
    for prompt in prompts:
        if typed := count(prompt.token_ids):
            row = known[prompt.id]
            messages = tuple(map(neutral, row.messages))
            plain = replace(row, problem=neutral(row.problem), columns=neutral(row.columns), messages=messages)
            with suppress(BadInput):  # a template may refuse a point
                if more := typed - count(tokenizer.encode(_text(tokenizer, plain, data, ""))):
                    found[tokenizer.special[next(iter(more))]] += 1
    return found


def keys_without_effect(rows: Iterable[ProblemRow], tokenizer: Tokenizer, data: Data) -> list[str]:
    """Return the keys for the chat template that are set, and without which, each alone and all of them together, all
    prompts have the same text."""
    clock = datetime.now().astimezone()
    variables = data.chat_template_kwargs
    texts = {f"data.{key}": key for key in ("system", "instruction") if getattr(data, key)}
    found: list[str] = []

    def without(*keys: str) -> Data:
        kept = {name: variables[name] for name in variables if f"data.chat_template_kwargs.{name}" not in keys}
        return data.model_copy(update={texts[key]: "" for key in texts if key in keys} | {"chat_template_kwargs": kept})

    for key in [*texts, *(f"data.chat_template_kwargs.{name}" for name in variables)]:
        same = (data, without(key), without(key, *found))
        with suppress(BadInput):  # a template may need it
            if all(len({_chat(tokenizer, row, one, clock, "") for one in same}) == 1 for row in rows):
                found.append(key)
    return found


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


def spell_columns(prompt: Prompt) -> str:
    """All columns of a prompt, which a reward can read, as one text. Equal columns have equal texts."""
    return json.dumps(dict(prompt.columns), sort_keys=True)


def _messages(row: ProblemRow) -> list[Mapping[str, Any]]:
    return list(row.messages) or [{"role": "user", "content": row.problem}]


def _chat(tokenizer: Tokenizer, row: ProblemRow, data: Data, clock: datetime | None, source: str) -> str:
    messages = _messages(row)
    begun = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    if data.instruction:
        line = data.instruction if data.instruction[0].isspace() else f"\n{data.instruction}"
        last = max(number for number, one in enumerate(messages) if one["role"] == "user")
        messages[last] = {**messages[last], "content": messages[last]["content"] + line}
    if data.system and messages[0]["role"] not in SYSTEM:
        messages.insert(0, {"role": "system", "content": data.system})
    try:
        render = partial(tokenizer.render, variables=data.chat_template_kwargs, clock=clock)
        text = render(messages)
        return text + (begun and _left(begun, text, messages, render))
    except BadInput as error:
        raise BadInput(
            f'data.prompt_template = "chat": {error} (for the problem {row.problem[:60]!r} of {source}); fix the '
            "template, or give a text with {problem} in it instead"
        ) from None


def _left(begun: str, text: str, messages: Sequence[Mapping[str, Any]], render: Callable[..., str]) -> str:
    """What a response begins with, without what the chat template writes of it by itself (<think>): the end of the
    prompt `text` that is not there before an answer in an earlier turn."""
    own = text
    turns = [{"role": role, "content": ANSWER} for role in ("assistant", "user")]
    with suppress(BadInput):  # a template may refuse several turns
        own = text[len(commonprefix((text, render([*messages, *turns], begins_answer=False)))) :]
    written = own.strip()
    if not written or not begun.startswith(written):
        return begun
    rest = begun.removeprefix(written)
    return rest.removeprefix(commonprefix((rest, own.rpartition(written)[2])))


def _fitting(
    rows: Mapping[str, ProblemRow], texts: Sequence[str], ids: Sequence[Sequence[int]], max_context: int
) -> tuple[list[tuple[int, Prompt]], Counter[str]]:
    """The prompts that fit, each with the number of its set, and the number of others by reason."""
    prompts: list[tuple[int, Prompt]] = []
    skipped: Counter[str] = Counter()
    for (key, row), text, tokens in zip(rows.items(), texts, ids, strict=True):
        if not tokens:
            skipped["no token"] += 1
        elif len(tokens) >= max_context:
            skipped["over-long"] += 1
        else:
            prompts.append((row.part, Prompt(key, row.problem, row.answer, tuple(tokens), row.columns, text)))
    return prompts, skipped
