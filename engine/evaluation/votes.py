r"""maj@k: the value of a majority vote over a problem's sampled answers.

A response votes for the answer that the reward reads in it: the first of `stated_answers` for "math", the text
after the last "#" for "exact". Votes for answers that the verifier considers equal are counted together. Every right
response votes for the right answer, in any spelling. A response without an answer abstains, and one without a score is
left out. If t answers tie at the top and the right one is among them, the value is 1/t, which is the mean over fair
draws among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.evaluation.intervals import is_right, majority_of
from engine.reward.extraction import stated_answers
from engine.reward.scorer import ResponseScorer
from engine.types import Group, Prompt, Response


@dataclass(frozen=True)
class Majority:
    """The outcome of one problem's vote."""

    answer: str
    """The answer with the most votes (of tied answers, the first that got a vote); empty if all responses abstained."""
    votes: int
    tied: int
    """Number of answers with that many votes."""
    value: float
    """1/tied if the right answer is among them, else 0."""
    bootstrap: float = field(default=0.0, compare=False)
    """Mean value of the majority of the same number of responses, drawn with replacement (engine.evaluation.intervals).
    Responses without an answer count as one wrong answer there, as in verl."""


@dataclass
class _Answer:
    text: str
    right: bool
    votes: int = 1
    spellings: set[str] = field(default_factory=set)


def _stated(text: str) -> str | None:
    return next(iter(stated_answers(text)), None) or None


def _marked(text: str) -> str | None:
    head, mark, tail = text.rpartition("#")
    found = tail.strip() if mark else (text.strip().splitlines() or [""])[-1].strip()
    return found or None


READ: dict[str, Callable[[str], str | None]] = {"math": _stated, "exact": _marked}
"""For each reward.function, the function that reads the answer in a response's text; None means that the response
abstains. Other rewards have no maj@k."""


async def majority_votes(groups: Sequence[Group], reward: str, verifier: ResponseScorer) -> list[Majority] | None:
    """The vote of each group; None for a reward whose answers cannot be read. `verifier` decides which answers are
    equal."""
    if reward not in READ:
        return None
    return list(await asyncio.gather(*(_majority(group, reward, verifier) for group in groups)))


async def _majority(group: Group, reward: str, verifier: ResponseScorer) -> Majority:
    answers: list[_Answer] = []
    for response, score in zip(group.responses, group.scores, strict=True):
        right = is_right(score)
        text = READ[reward](response.text)
        if score.excluded or (text is None and not right):
            continue
        spelled = text if text is not None else group.prompt.answer
        place = await _find(answers=answers, text=spelled, right=right, reward=reward, verifier=verifier)
        if place is None:
            answers.append(_Answer(spelled, right, spellings={spelled}))
        else:
            place.votes += 1
            place.spellings.add(spelled)
    known = sum(not score.excluded for score in group.scores)
    return await asyncio.to_thread(_outcome, answers, silent=known - sum(answer.votes for answer in answers))


async def _find(
    answers: Sequence[_Answer], text: str, right: bool, reward: str, verifier: ResponseScorer
) -> _Answer | None:
    """The answer that this vote is for; None if it is new. All right answers are one answer. Wrong answers are compared
    by text, then by the verifier."""
    alike = [answer for answer in answers if answer.right == right]
    if right:
        return alike[0] if alike else None
    for answer in alike:
        if text in answer.spellings:
            return answer
    if reward == "math":
        for answer in alike:
            if await _equal(answer.text, text, verifier):
                return answer
    return None


async def _equal(gold: str, text: str, verifier: ResponseScorer) -> bool:
    """Whether the math verifier, in its worker processes, considers the answers equal. False for a call that reaches
    its time limit."""
    (score,) = await verifier.score(Prompt("", "", gold, ()), [Response.of_text(f"\\boxed{{{text}}}")])
    return score.value >= 1.0


def _outcome(answers: Sequence[_Answer], silent: int) -> Majority:
    """The outcome; `silent`: number of responses that abstained."""
    if not answers:
        return Majority("", 0, 0, 0.0)
    most = max(answer.votes for answer in answers)
    top = [answer for answer in answers if answer.votes == most]
    right = next((number for number, answer in enumerate(answers) if answer.right), None)
    return Majority(
        answer=top[0].text,
        votes=most,
        tied=len(top),
        value=any(answer.right for answer in top) / len(top),
        bootstrap=majority_of([*(answer.votes for answer in answers), *([silent] if silent else [])], right),
    )
