r"""maj@k: the value of a majority vote over a problem's sampled answers.

A response votes for the answer that the reward reads in it: the first of `stated_answers` for "math", the text
after the last "#" for "exact". Votes for answers that a chain of equal ones connects, as the verifier considers them,
are counted together, so that the order of the responses changes nothing. Every right response votes for the right
answer, in any spelling. A response without an answer abstains, and one without a score is left out. If t answers tie at
the top and the right one is among them, the value is 1/t, which is the mean over fair draws among them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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
    """The answer with the most votes, in its most frequent spelling; of tied ones the first in the order of characters;
    empty if all responses abstained."""
    votes: int
    tied: int
    """Number of answers with that many votes."""
    value: float
    """1/tied if the right answer is among them, else 0."""
    bootstrap: float = field(default=0.0, compare=False)
    """Mean value of the majority of the same number of responses, drawn with replacement (engine.evaluation.intervals).
    Responses without an answer count as one wrong answer there, as in verl."""


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
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    texts = await asyncio.to_thread(lambda: [READ[reward](response.text) for response in group.responses])
    for text, score in zip(texts, group.scores, strict=True):
        if is_right(score):
            right[group.prompt.answer if text is None else text] += 1
        elif text is not None and not score.excluded:
            wrong[text] += 1
    others = await _together(wrong, verifier) if reward == "math" else [Counter({text: wrong[text]}) for text in wrong]
    known = sum(not score.excluded for score in group.scores)
    return await asyncio.to_thread(_outcome, right, others, silent=known - right.total() - wrong.total())


async def _together(votes: Counter[str], verifier: ResponseScorer) -> list[Counter[str]]:
    """The votes for each answer: texts that a chain of equal texts connects are one answer. Equality is not transitive:
    both 50 and 0.5 equal 50%. So only chains do not depend on the order of the responses."""
    found: list[Counter[str]] = []
    for text in sorted(votes):
        linked = [answer for answer in found if any([await _equal(one, text, verifier) for one in answer])]
        found = [answer for answer in found if answer not in linked]
        found.append(sum(linked, Counter({text: votes[text]})))
    return found


async def _equal(gold: str, text: str, verifier: ResponseScorer) -> bool:
    """Whether the math verifier, in its worker processes, considers the answers equal. False for a call that reaches
    its time limit."""
    (score,) = await verifier.score(Prompt("", "", gold, ()), [Response.of_text(f"\\boxed{{{text}}}")])
    return score.value >= 1.0


def _outcome(right: Counter[str], wrong: Sequence[Counter[str]], silent: int) -> Majority:
    """The outcome; `silent`: number of responses that abstained."""
    answers = sorted(([right] if right else []) + list(wrong), key=lambda votes: (-votes.total(), _spelling(votes)))
    if not answers:
        return Majority("", 0, 0, 0.0)
    counts = [votes.total() for votes in answers]
    tied = counts.count(counts[0])
    place = answers.index(right) if right else None
    return Majority(
        answer=_spelling(answers[0]),
        votes=counts[0],
        tied=tied,
        value=1 / tied if place is not None and place < tied else 0.0,
        bootstrap=majority_of([*counts, *([silent] if silent else [])], place),
    )


def _spelling(votes: Counter[str]) -> str:
    """The most frequent text of an answer, and of several the first in the order of characters."""
    return min(votes, key=lambda text: (-votes[text], text))
