"""Decides whether a new policy becomes champion: only if a paired comparison on the same benchmark shows that it is
better.

If there is no champion yet, the new policy is compared with its base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import BadInput, counted
from engine.evaluation.paired import Paired, compare_paired
from engine.evaluation.tables import protocol_differences
from engine.types import JsonObject


@dataclass(frozen=True)
class Results:
    """The stored evaluation of a registered policy."""

    protocol: Mapping[str, Any]
    """How the responses were sampled and scored (`tables.evaluation_protocol`)."""
    means: Mapping[str, float]
    """Prompt id → mean score."""
    unscored: int
    """Number of responses without a score, which are not in the means. A policy must not win by failing its judge."""

    def as_dict(self) -> JsonObject:
        """The results as JSON."""
        return {"protocol": dict(self.protocol), "means": dict(self.means), "unscored": self.unscored}

    @staticmethod
    def of(stored: object) -> Results:
        """Read the result of `as_dict`. Raises BadInput for anything else."""
        kinds = {"protocol": dict, "means": dict, "unscored": int}
        if not isinstance(stored, dict) or not all(isinstance(stored.get(key), kind) for key, kind in kinds.items()):
            raise BadInput("the stored results can't be read: expected protocol, means and unscored")
        means = {str(key): float(value) for key, value in stored["means"].items()}
        return Results(stored["protocol"], means, stored["unscored"])


@dataclass(frozen=True)
class ChampionVerdict:
    """The outcome of a challenge."""

    wins: bool
    reason: str
    """Why the policy wins or does not, as text."""
    comparison: Paired | None = None


def judge_first(ours: Results | None, base: Results | None) -> ChampionVerdict:
    """Whether a new policy becomes the first champion: only if it is better than its base model.

    If the base model has no comparable evaluation (`base` is None), any policy with an evaluation becomes champion, and
    the reason says so.
    """
    if ours is not None and base is None:
        return ChampionVerdict(True, "there was no champion; not compared: the base model has no comparable evaluation")
    found = judge_challenge(ours, base, "base model")
    return ChampionVerdict(
        found.wins, found.reason if ours is None else f"there was no champion; {found.reason}", found.comparison
    )


def judge_challenge(ours: Results | None, theirs: Results | None, whom: str = "champion") -> ChampionVerdict:
    """Compare a new policy with the champion, or with another model. `whom` is the other's name in messages.

    Evaluations with other problems, sampling or scoring are not compared: the champion stays, and the reason says so.
    """
    if ours is None:
        return ChampionVerdict(False, "the new policy was not evaluated on the run's first benchmark")
    if theirs is None:
        return ChampionVerdict(False, f"the {whom} has no results to compare with")
    if wrong := protocol_differences(ours.protocol, theirs.protocol):
        problems = f"problems ({len(ours.means)}, {len(theirs.means)})"
        named = ", ".join(problems if one == "problems" else one for one in wrong)
        return ChampionVerdict(
            False, f"its evaluation can't be compared with the {whom}'s: {named} differ (new, {whom})"
        )
    if ours.unscored > theirs.unscored or ours.means.keys() != theirs.means.keys():
        unscored = f"{ours.unscored} of its responses have no score, {theirs.unscored} of the {whom}'s"
        return ChampionVerdict(False, f"its evaluation can't be compared with the {whom}'s: {unscored}")
    found = compare_paired(ours.means, theirs.means, int(ours.protocol["evaluate.samples"]))
    text = (
        f"difference {found.difference:+.4f} [{found.ci_low:+.4f}, {found.ci_high:+.4f}] on "
        f"{counted(found.problems, 'problem')}, "
        f"p = {found.p_value:.4g}"
    )
    if found.says_better:
        return ChampionVerdict(True, f"better than the {whom} at {found.confidence:.0%} confidence: {text}", found)
    return ChampionVerdict(False, f"not better than the {whom} at {found.confidence:.0%} confidence: {text}", found)
