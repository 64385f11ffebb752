"""Where a row of a problem set has its problem and its answer.

Known are the columns of DeepScaleR (problem, answer, solution), of GSM8K (question, answer), of TRL (prompt, and an
answer under any of its usual names), of verl (prompt, reward_model.ground_truth) and of OpenAI (messages).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import Config
from engine.data.problem_files import spell_value
from engine.reward.extraction import boxed_answer
from engine.reward.math.canonical import join_thousands
from engine.types import JsonObject

PROBLEM = ("problem", "question", "prompt", "messages")
"""Names of the column with the problem, in order of preference."""
ANSWER = ("answer", "final_answer", "ground_truth", "reward_model.ground_truth")
"""Names of the column with the gold answer; a list in `final_answer` is joined by commas, as in OlympiadBench."""
SOLUTION = "solution"
r"""Name of the column with the answer if no answer column has one: what follows #### in its last line, else its last
\boxed{…}, else its whole text if the row has no answer column."""
COMPLETION = "completion"
"""Name of the column in which TRL has a response, which is not trained on."""
GSM8K_READ = "the answer is what follows ####, as in GSM8K"
UNREAD = "the assistant's message at the end, or its column completion, is not read"
SYSTEM = ("system", "developer")
"""Roles of a message that gives instructions rather than a turn of the conversation."""
_GSM8K = re.compile(
    r"(?:.*\n)?[^\S\n]*####[^\S\n]*(?P<answer>(?:[^\n#]*[^\s#])?)\s*"
    r"(?:\n *The answer is[^\n]*\s*)?",  # as MetaMathQA goes on
    re.DOTALL,
)
PLACEHOLDER = re.compile(r"(?P<command>\\[A-Za-z]+)?(?P<open>\{?)\{(?P<name>[A-Za-z_][\w.-]*)\}(?P<close>\}?)")
"""A name in braces in a template, with the LaTeX command of which it is the argument, and second braces around it."""


def is_placeholder(found: re.Match[str]) -> bool:
    """Whether a name in braces stands for the problem or for a column."""
    doubled = found["open"] and found["close"]
    return found["name"] == "problem" or not (found["command"] or doubled)


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template of `data.prompt_template` reads besides the problem, sorted."""
    names = {found["name"] for found in PLACEHOLDER.finditer(template) if is_placeholder(found)}
    return tuple(sorted(names - {"problem"}))


@dataclass(frozen=True)
class RowFormat:
    """How the rows of the sets of a run are read."""

    problem: str = ""
    """Column of the problem (`data.columns.problem`)."""
    answer: str = ""
    """Column of the answer (`data.columns.answer`)."""
    own_reward: bool = False
    """Whether a user's reward reads the answer: it may be anything, or be missing from every row."""
    shown: tuple[str, ...] = ()
    """Columns that the prompt template reads besides the problem."""

    @classmethod
    def of(cls, config: Config) -> RowFormat:
        """The format that a run's configuration describes."""
        columns = config.data.columns
        return cls(columns.problem, columns.answer, config.reward.is_own, template_columns(config.data.prompt_template))

    def without_missing(self, rows: Sequence[Mapping[str, Any]]) -> RowFormat:
        """The format for a set of these rows. A named column that none of them has is forgotten."""
        kept = [name if any(has_column(row, name) for row in rows) else "" for name in (self.problem, self.answer)]
        return replace(self, problem=kept[0], answer=kept[1])


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
    remarks: tuple[str, ...] = ()
    """How the row was read, where that is not plain from its columns: GSM8K_READ, UNREAD, and that it has no answer."""
    refused: bool = False
    """Whether the row cannot be used, because what the assistant says at the end has no certain meaning."""


def find_fields(row: Mapping[str, Any], layout: RowFormat) -> RowFields:
    """Find problem and answer of a row by the columns' names."""
    present = [name for name in PROBLEM if has_column(row, name)]
    filled = [name for name in present if not is_missing(column(row, name))]
    problem_column = layout.problem or next(iter(filled or present), "problem")
    problem = column(row, problem_column)
    answer_column, answer, gsm8k = _answer(row, layout.answer)
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
            refused = bool(completion and not is_missing(answer) and kind != "messages")
        problem = _conversation_text(asked)
    if completion and is_missing(answer) and not layout.answer:
        answer_column = problem_column
        answer, gsm8k = _stated(completion[-1].get("content"))
    responses = {COMPLETION: column(row, COMPLETION), problem_column: list(completion)}
    unread = any(
        not f"{answer_column}.".startswith(f"{place}.") and not is_missing(said) for place, said in responses.items()
    )
    unanswered = layout.own_reward and is_missing(answer)
    found = [f"no answer is found in its columns {', '.join(row)}, so prompt.answer is empty"]
    remarks = (*[GSM8K_READ] * gsm8k, *[UNREAD] * unread, *found * unanswered)
    return RowFields(problem_column, answer_column, problem, answer, messages, remarks, refused)


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
    """Whether a value says nothing: null, NaN (how data frames write null), a blank text, a list of nothing else."""
    if isinstance(value, list):
        return all(map(is_missing, value))
    return value is None or value != value or (isinstance(value, str) and not value.strip())  # NaN is not itself


def _answer(row: Mapping[str, Any], named: str) -> tuple[str, Any, bool]:
    """(column, value, whether it was in GSM8K's form); ("", None, False) if the row has no such column."""
    columns = [named] if named else [name for name in (*ANSWER, SOLUTION) if has_column(row, name)]
    for name in columns:
        answer, gsm8k = _stated(column(row, name))
        if name == "final_answer" and isinstance(answer, list):
            answer = ", ".join(spell_value(one) for one in answer if not is_missing(one))
        if name == SOLUTION != named and isinstance(answer, str) and not gsm8k:
            answer = boxed_answer(answer) or (answer if columns == [SOLUTION] else None)
        if not is_missing(answer):
            return name, answer, gsm8k
    return (columns[0], *_stated(column(row, columns[0]))) if columns else ("", None, False)


def _stated(value: Any) -> tuple[Any, bool]:  # noqa: ANN401
    """What follows #### in the last line of a text, and True; any other value as it is, and False. A text with nothing
    behind its #### has no answer."""
    found = _GSM8K.fullmatch(value) if isinstance(value, str) else None
    return (join_thousands(found["answer"]), bool(found["answer"])) if found else (value, False)


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
