"""Which faults a run gets, and when: a function of the seed, the minutes and the kinds that the machine permits."""

import random
from dataclasses import dataclass

ROLES = ("orchestrator", "rank", "agent", "instance", "guest", "verifier", "flow", "worker")
"""The processes of a run. The agent is torch elastic's, the guest the instance that joined, the worker Prefect's."""
LINKS = ("delay", "hold to the guest", "hold from the guest", "hold both ways")
"""What the proxy between orchestrator and guest does to every byte. A held byte goes on when the link heals, as one
that TCP sends again."""
KINDS = (
    *(("kill", role) for role in ROLES),
    *(("stop", role) for role in ROLES),
    ("out of memory", "largest"),
    *(("link", mode) for mode in LINKS),
    ("link", "down"),
    ("no space", "run folder"),
    *(("restart", server) for server in ("prefect", "mlflow", "s3")),
    *(("flip a byte", place) for place in ("checkpoint", "bucket", "reply")),
    ("garbage", "reply"),
)
"""(kind, target) of every fault."""
CONDITIONAL = frozenset({"no space", "down"})
"""What not every machine permits: the one needs a file system of its own, the other a network namespace."""
LEFT_OUT = "Clock jumps are left out: the machine's clock is never set."

GAP_S = (20.0, 60.0)
"""Seconds between two faults."""
LONGEST_S = 120.0
"""Most seconds that a fault lasts."""
SHORTEST_S = 2.0
WHOLE_MINUTES = 10.0
"""Schedules of fewer minutes have shorter gaps and faults, in proportion down to a third."""
VERIFIER_S = 10.0
"""Most seconds that a verifier is stopped. A call that takes longer than reward.timeout_s scores 0, by definition, and
the weights would be others."""


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at_s: float
    """Seconds after the beginning."""
    kind: str
    target: str
    for_s: float
    """How long it lasts; 0 where it is over at once."""
    choice: float
    """In [0, 1): which of several processes, files or bytes."""

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.0f} s" if self.for_s else ""
        return f"at {self.at_s:6.1f} s  {self.kind}, {self.target}{lasts} (choice {self.choice:.3f})"


def schedule(seed: int, minutes: float, permitted: frozenset[str] = CONDITIONAL) -> list[Fault]:
    """The faults in order, the last one before the minutes are over.

    `permitted`: which of `CONDITIONAL` the machine permits; leaving one out moves nothing else. Each (kind, target)
    comes once before one comes again.
    """
    draw = random.Random(f"chaos {seed} {minutes:g}")
    scale = min(1.0, max(1 / 3, minutes / WHOLE_MINUTES))
    found: list[Fault] = []
    deck: list[tuple[str, str]] = []
    at_s = 0.0
    while True:
        at_s += draw.uniform(*GAP_S) * scale
        if round(at_s, 1) >= 60.0 * minutes:
            return found
        if not deck:
            deck = list(KINDS)
            draw.shuffle(deck)
        kind, target = deck.pop()
        for_s = round(_length(kind, target, draw.random(), scale), 1)
        choice = draw.random()
        if not {kind, target} & (CONDITIONAL - permitted):
            found.append(Fault(at_s=round(at_s, 1), kind=kind, target=target, for_s=for_s, choice=choice))


def _length(kind: str, target: str, where: float, scale: float) -> float:
    """Seconds that a fault lasts: evenly spread in its logarithm between the shortest and the longest."""
    if kind not in ("stop", "link", "no space", "restart"):
        return 0.0
    longest = LONGEST_S * scale
    if (kind, target) == ("stop", "verifier"):
        longest = VERIFIER_S
    elif kind in ("restart", "no space"):
        longest /= 2
    return SHORTEST_S * (longest / SHORTEST_S) ** where
