"""The lengths of prompts and responses: those of a run, or drawn from a log-normal distribution."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import BadInput, counted
from engine.run.trace import Span

Z99 = 2.3263478740408408
"""The 99 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of whole groups. Each step draws its groups from these."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """(prompt tokens, tokens of each response) of each known group."""
    source: str
    """The source of the lengths, in words."""

    @property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return sum(sum(responses) for _, responses in self.groups) / sum(len(each) for _, each in self.groups)

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return sum(prompt for prompt, _ in self.groups) / len(self.groups)

    @property
    def mean_group(self) -> float:
        """Mean tokens of a group. The prompt counts once."""
        return sum(prompt + sum(responses) for prompt, responses in self.groups) / len(self.groups)

    def draw_groups(self, count: int, size: int, seed: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return `count` groups of `size` responses. Whole groups are drawn, because the responses to a hard problem
        are all long. If a group has another size, responses are drawn from it."""
        chance = random.Random(seed)
        drawn = []
        for _ in range(count):
            prompt, responses = chance.choice(self.groups)
            if len(responses) != size:
                responses = tuple(chance.choices(responses, k=size))
            drawn.append((prompt, responses))
        return drawn

    def scaled(self, factor: float, longest: int) -> Lengths:
        """The lengths with each response `factor` times as long, but at most `longest` tokens."""
        return Lengths(
            tuple(
                (prompt, tuple(min(longest, max(1, round(factor * one))) for one in responses))
                for prompt, responses in self.groups
            ),
            f"{self.source}, responses × {factor:g}",
        )

    @staticmethod
    def of_run(spans: Iterable[Span]) -> Lengths:
        """The groups of a run, from its rollout spans. A response that was cut and continued is the sum of its parts.

        Raises BadInput for a run that sampled nothing.
        """
        prompts: dict[tuple[int, int], int] = {}
        tokens: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for span in spans:
            if span["name"] == "rollout":
                group = (span["step"], span["group"])
                prompts[group] = span["prompt_tokens"]
                tokens[group][span["number"]] += span["tokens"]
        if not prompts:
            raise BadInput("the run sampled nothing: its trace has no responses")
        groups = tuple((prompts[group], tuple(each.values())) for group, each in tokens.items())
        return Lengths(groups, f"{counted(len(groups), 'group')} of the run")

    @staticmethod
    def drawn(mean: float, p99: float, prompt: int, longest: int, count: int = 2048, seed: int = 0) -> Lengths:
        """Log-normal lengths with this mean and 99 % quantile, cut at `longest`. Half of the variance is shared within
        a group, because the responses to one problem are similar. Raises BadInput if no log-normal distribution has
        these figures."""
        if p99 <= mean or mean < 1:
            raise BadInput(
                f"response lengths: the mean is {mean:g}, the 99 % quantile {p99:g}; the latter must be above the mean"
            )
        # ln(p99) = mu + z sigma and ln(mean) = mu + sigma^2 / 2 give two values of sigma; this is the smaller
        log = math.log(p99 / mean)
        if 2 * log > Z99**2:
            raise BadInput(
                f"response lengths: no log-normal distribution has a 99 % quantile of {p99 / mean:.1f} times its mean; "
                f"at most {math.exp(Z99**2 / 2):.1f} times"
            )
        sigma = Z99 - math.sqrt(Z99**2 - 2 * log)
        mu = math.log(mean) - sigma**2 / 2
        chance = random.Random(seed)
        share = math.sqrt(0.5)
        groups = []
        for _ in range(count):
            common = chance.gauss(0, 1)
            each = [mu + sigma * share * (common + chance.gauss(0, 1)) for _ in range(8)]
            groups.append((prompt, tuple(min(longest, max(1, round(math.exp(one)))) for one in each)))
        return Lengths(tuple(groups), f"log-normal, mean {mean:g}, 99 % below {p99:g}, at most {longest:,}")
