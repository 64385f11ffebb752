"""Where a row of a problem set has its problem and its answer.

Known are the columns of DeepScaleR (problem, answer, solution), of GSM8K (question, answer), of TRL (prompt, and an
answer under any of its usual names), of verl (prompt, reward_model.ground_truth) and of OpenAI (messages).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import Config
from engine.data.problem_files import spell_value
from engine.reward.extraction import last_boxed
from engine.reward.math.canonical import join_thousands
from engine.types import JsonObject

PROBLEM = ("problem", "question", "prompt", "messages")
"""Names of the column with the problem, in order of preference."""
ANSWER = ("answer", "final_answer", "ground_truth", "reward_model.ground_truth")
"""Names of the column with the gold answer; a list in `final_answer` is joined by commas, as in OlympiadBench."""
SOLUTION = "solution"
r"""Name of the column whose last \boxed{…} is the answer if no answer column has one. Its whole text is the answer if
it has no box and the row has no answer column."""
SYSTEM = ("system", "developer")
"""Roles of a message that gives instructions rather than a turn of the conversation."""
_GSM8K = re.compile(
    r"(?:.*\n)?[^\S\n]*####[^\S\n]*(?P<answer>[^\n#]*[^\s#])\s*"
    r"(?:\n *The answer is[^\n]*\s*)?",  # as MetaMathQA goes on
    re.DOTALL,
)


@dataclass(frozen=True)
class RowFormat:
    """How the rows of the sets of a run are read."""

    problem: str = ""
    """Column of the problem (`data.columns.problem`)."""
    answer: str = ""
    """Column of the answer (`data.columns.answer`)."""
    own_reward: bool = False
    """Whether a user's reward reads the answer: it may be anything, or be missing from every row."""

    @classmethod
    def of(cls, config: Config) -> RowFormat:
        """The format that a run's configuration describes."""
        columns = config.data.columns
        return cls(columns.problem, columns.answer, config.reward.is_own)

    def without_missing(self, rows: Sequence[Mapping[str, Any]]) -> RowFormat:
        """The format for a set of these rows. A named column that none of them has is forgotten."""
        known = {name for name in (self.problem, self.answer) if any(has_column(row, name) for row in rows)}
        return replace(
            self,
            problem=self.problem if self.problem in known else "",
            answer=self.answer if self.answer in known else "",
        )


USUAL = RowFormat()
"""Columns by their usual names, and answers that a built-in reward reads."""


@dataclass(frozen=True)
class RowFields:
    """What was found in a row. A problem or answer that is missing is None."""

    problem_column: str
    answer_column: str
    problem: Any
    answer: Any
    messages: tuple[JsonObject, ...] = ()
    """The messages of a prompt that is a conversation. If the last is the assistant's, the response continues it."""
    gsm8k: bool = False
    """Whether the answer is what follows #### in a last line, as in GSM8K."""
    unread: bool = False
    """Whether the conversation ends with an answer that nothing reads, because a column has the answer."""
    refused: bool = False
    """Whether the row cannot be used, because what the assistant says at the end has no certain meaning."""


def find_fields(row: Mapping[str, Any], layout: RowFormat) -> RowFields:
    """Find problem and answer of a row by the columns' names."""
    present = [name for name in PROBLEM if has_column(row, name)]
    filled = [name for name in present if not is_missing(column(row, name))]
    problem_column = layout.problem or next(iter(filled or present), "problem")
    problem = column(row, problem_column)
    answer_column, answer = _answer(row, layout.answer)
    messages: tuple[JsonObject, ...] = ()
    completion: tuple[JsonObject, ...] = ()
    refused = False
    if isinstance(problem, list) and problem and all(isinstance(one, dict) and "role" in one for one in problem):
        messages = tuple(map(_message, problem))
        asked = _without_answer(messages)
        completion = messages[len(asked) :]
        kind = problem_column.rpartition(".")[2]
        if kind == "prompt":  # as TRL and verl have it, the response continues what the assistant begins
            refused = any(one.get("tool_calls") or not isinstance(one.get("content"), str) for one in completion)
            completion = ()
        else:
            messages = asked
            refused = bool(completion and answer_column and kind != "messages")
        problem = _conversation_text(asked)
    if completion and not answer_column:
        answer_column = problem_column
        answer = completion[0].get("content")
    found = _GSM8K.fullmatch(answer) if isinstance(answer, str) else None
    return RowFields(
        problem_column,
        answer_column,
        problem,
        join_thousands(found["answer"]) if found else answer,
        messages,
        gsm8k=found is not None,
        unread=bool(completion) and answer_column != problem_column,
        refused=refused,
    )


def has_column(row: Mapping[str, Any], path: str) -> bool:
    """Whether a row has the column, which may be empty."""
    return _step(row, path) is not _ABSENT


def column(row: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401
    """The value of a column; a dot leads into an object, or to the place in a list. None if there is none."""
    found = _step(row, path)
    return None if found is _ABSENT else found


_ABSENT = object()


def _step(value: Any, path: str) -> Any:  # noqa: ANN401
    if isinstance(value, Mapping) and path in value:
        return value[path]
    first, dot, rest = path.partition(".")
    if isinstance(value, Mapping):
        inner = value.get(first, _ABSENT)
    elif isinstance(value, list) and first.lstrip("-").isdigit() and -len(value) <= int(first) < len(value):
        inner = value[int(first)]
    else:
        return _ABSENT
    return _step(inner, rest) if dot else inner


def is_missing(value: object) -> bool:
    """Whether a value says nothing: null, NaN (how data frames write null), a blank text, an empty list."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _answer(row: Mapping[str, Any], named: str) -> tuple[str, Any]:
    """(column, value); ("", None) if the row has no such column."""
    if named:
        return named, column(row, named)
    present = [name for name in ANSWER if has_column(row, name)]
    for name in present:
        value = column(row, name)
        if not is_missing(value):
            joins = name == "final_answer" and isinstance(value, list)
            return name, ", ".join(map(spell_value, value)) if joins else value
    solution = row.get(SOLUTION)
    if isinstance(solution, str):
        whole = solution if not present or _GSM8K.fullmatch(solution) else ""
        if found := last_boxed(solution) or whole:
            return SOLUTION, found
    if present:
        return present[0], column(row, present[0])
    return (SOLUTION, solution) if SOLUTION in row else ("", None)


def _without_answer(messages: tuple[JsonObject, ...]) -> tuple[JsonObject, ...]:
    """The messages before the assistant's at the end; none without a message of the user."""
    asked = [number for number, one in enumerate(messages, 1) if one["role"] != "assistant"]
    return messages[: asked[-1]] if any(one["role"] == "user" for one in messages) else ()


def _message(given: JsonObject) -> JsonObject:
    """A message without the keys that a Parquet file fills with null. Parts that are texts are joined. A call of a tool
    has the text "", since many templates add up texts."""
    message = {key: value for key, value in given.items() if value is not None}
    if message.get("tool_calls"):
        message.setdefault("content", "")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message["content"] = "".join(str(part.get("text", "")) for part in content)
    return message


def _conversation_text(messages: Sequence[JsonObject]) -> Any:  # noqa: ANN401
    """The user's message, or several turns with their roles, without instructions of the system. A message whose
    content is no text is returned as it is, and None if there is no turn."""
    odd = next((one for one in messages if not isinstance(one.get("content"), str)), None)
    turns = [one for one in messages if one["role"] not in SYSTEM]
    if odd is not None or not turns:
        return odd
    if len(turns) == 1:
        return turns[0]["content"]
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in turns)


def identity_text(problem: str, messages: tuple[JsonObject, ...]) -> str:
    """The text by which two problems are the same: the problem itself, or all messages if there are several."""
    return problem if len(messages) < 2 else json.dumps(messages, ensure_ascii=False, sort_keys=True)
