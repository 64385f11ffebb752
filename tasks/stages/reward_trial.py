"""Tries a recipe's reward without a run, in the process and with the limits of one."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import Config, Reward
from engine.data.prepared import prepare_problems
from engine.data.problem_statistics import describe_report, report_data
from engine.data.problems import Problems
from engine.data.prompts import encode_problems, prompt_id
from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput, RewardError, counted
from engine.orchestrator.workers.verifier_pool import VerifierPool
from engine.types import Prompt, Response, Score

WRONG = "I do not know."
"""A response that no reward for an answer takes for right."""
WIDTH = 28
"""Characters of a problem or response that the table shows."""


@dataclass(frozen=True)
class GivenResponse:
    """A response to score."""

    text: str
    prompt_id: str = ""
    """Id of its problem; empty: it answers every problem that is tried."""


def read_given(texts: Sequence[str], file: Path | None) -> list[GivenResponse]:
    """The responses that a command gives as texts or as JSON lines with "response" and, if they are a run's, with
    "prompt_id". Raises BadInput for both, and for a file of another form."""
    if texts and file is not None:
        raise BadInput("--response gives texts, --responses a file: give one of them")
    if file is None:
        return [GivenResponse(text) for text in texts]
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--responses {file}: can't be read: {error}") from None
    found = [_given(line, f"--responses {file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadInput(f"--responses {file}: it has no line")
    return found


def _given(line: str, where: str) -> GivenResponse:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadInput(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise BadInput(f'{where}: expected an object with a text "response"')
    return GivenResponse(row["response"], str(row.get("prompt_id", "")))


def run_trial(config: Config, given: Sequence[GivenResponse], rows: int) -> tuple[str, bool]:
    """Score responses to problems of data.train. Return what a run says of the data, the first prompt as the model gets
    it, a table of the scores and what they mean; and whether each response has a score.

    The problems are those that `given` names, and the first `rows` ones unless it names all. Without `given` each
    problem has two responses: its own answer, and WRONG. Raises BadInput if data or reward can't be loaded, if a named
    problem is not there, or if the recipe has a program.
    """
    data = config.data
    if config.rollout.program:
        raise BadInput(
            f"rollout.program = {config.rollout.program!r}: a program makes each response in turns with a model, and "
            "its score, so there is no reward to try on texts; try it in a run: --set train.steps=1"
        )
    model = Path(config.model.path)
    tokenizer = Tokenizer(model, config.rollout.stop, data.prompt_template, data.chat_template_kwargs)
    calls = []
    prepared = prepare_problems(config)
    for prompt in _chosen_prompts(config, prepared.train, tokenizer, given, rows):
        texts = [one.text for one in given if one.prompt_id in ("", prompt.id)] if given else [prompt.answer, WRONG]
        calls.append((prompt, [_response(tokenizer, text) for text in texts]))
    tried = asyncio.run(_score_all(config, tokenizer, calls))
    report = f"{describe_report(report_data(prepared))}\n\nthe first prompt as the model gets it:\n"
    shown = "".join(tokenizer.pieces(calls[0][0].token_ids))
    return f"{report}{shown}\n\n{_table(tried)}\n{_verdict(tried)}", all(one.score.status == "ok" for one in tried)


def _chosen_prompts(
    config: Config, problems: Problems, tokenizer: Tokenizer, given: Sequence[GivenResponse], rows: int
) -> Sequence[Prompt]:
    named = {one.prompt_id for one in given if one.prompt_id}
    first = rows if not given or any(not one.prompt_id for one in given) else 0
    ids = [prompt_id(row.identity, row.answer) for row in problems.rows]
    if missing := named.difference(ids):
        raise BadInput(f"--responses: no problem of {problems.source} has the prompt_id {min(missing)}")
    chosen = [row for number, row in enumerate(problems.rows) if number < first or ids[number] in named]
    problems = replace(problems, rows=tuple(chosen))
    return encode_problems(problems, tokenizer, config.data, config.rollout.max_context).prompts


def _response(tokenizer: Tokenizer, text: str) -> Response:
    ids = tuple(tokenizer.encode(text))
    sampled = replace(Response.of_text(text), token_ids=ids, versions=((0, 0),), instance="try-reward")
    return replace(sampled, logprobs=(0.0,) * len(ids), loss_mask=(True,) * len(ids))


def score_first_problem(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> str:
    """Call the user's reward before a run starts, as the run will: on a problem with its own answer and an empty
    response (for a reward of groups, as many as make a group). Return a line with the scores, or with their failures if
    `reward.on_error` or `reward.on_timeout` counts these. Raises BadInput if it would end the run."""
    settings = config.reward.model_copy(update={"workers": 1})
    where = f"{config.reward.label} was called with {_excerpt(prompt.problem)!r}, its answer and an empty response"
    try:
        scores = asyncio.run(_score_first(settings, config, tokenizer, prompt))
    except RewardError as error:
        raise BadInput(f"{error} (before the start, {where})") from None
    if failed := next((score for score in scores if score.status != "ok"), None):
        return f"{where}: {failed.detail}"
    first, second = map(_value, scores[:2])
    return f"{where}: scores {first} and {second}{'; equal, see metronome try-reward' if first == second else ''}"


async def _score_first(settings: Reward, config: Config, tokenizer: Tokenizer, prompt: Prompt) -> list[Score]:
    pool = VerifierPool(settings)
    try:
        await pool.start(tokenizer.for_verifiers)
        size = 2 if pool.per_response else max(2, config.rollout.group_size)
        empty = replace(_response(tokenizer, ""), token_ids=tokenizer.stop_ids[:1])  # as a model ends one
        return await pool.score(prompt, [_response(tokenizer, prompt.answer), *[empty] * (size - 1)])
    finally:
        pool.close()


@dataclass(frozen=True)
class _Tried:
    problem: str
    response: str
    score: Score
    seconds: float
    """Time to score the response, or all responses to the problem if the reward takes them in one call."""


async def _score_all(
    config: Config, tokenizer: Tokenizer, calls: Sequence[tuple[Prompt, Sequence[Response]]]
) -> list[_Tried]:
    settings = {"workers": 1, "on_error": "zero", "on_timeout": "zero"}  # so that each failure has its line
    pool = VerifierPool(config.reward.model_copy(update=settings))
    found = []
    try:
        await pool.start(tokenizer.for_verifiers)
        for prompt, responses in calls:
            for group in [[one] for one in responses] if pool.per_response else [responses]:
                began = time.monotonic()
                scores = await pool.score(prompt, group)
                seconds = time.monotonic() - began
                pairs = zip(group, scores, strict=True)
                found += [_Tried(prompt.problem, one.text, score, seconds) for one, score in pairs]
    finally:
        pool.close()
    return found


def _table(tried: Sequence[_Tried]) -> str:
    lines = [("problem", "response", "score", "seconds", "metrics")]
    for one in tried:
        score = one.score
        metrics = [f"{name} {number:g}" for name, number in score.metrics.items()]
        lines.append(
            (
                _excerpt(one.problem),
                _excerpt(one.response),
                _value(score) if score.status == "ok" else score.status,
                f"{one.seconds:.3f}",
                "; ".join([*metrics, *([score.detail] if score.detail and score.status == "ok" else [])]),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _verdict(tried: Sequence[_Tried]) -> str:
    """The failures, each once, or what the scores would teach."""
    failed = [one.score.detail.partition(": ")[2] for one in tried if one.score.status != "ok"]
    if failed:
        whys = Counter(failed).items()
        return "\n".join(f"error: {count} of {counted(len(tried), 'response')}: {why}" for why, count in whys)
    values = sorted({_value(one.score) for one in tried})
    if len(values) > 1:
        return f"scores differ: {', '.join(values)}"
    return (
        f"all scores are equal ({values[0]}), and a group of equal scores teaches nothing. If a right one is among "
        "them, the reward may want a format: give --response TEXT as the model should write it, or --responses FILE"
    )


def _value(score: Score) -> str:
    return "excluded" if score.excluded else f"{score.value:g}"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
