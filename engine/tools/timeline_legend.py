"""What the lanes and the colours of the timeline mean, in words."""

from __future__ import annotations

from collections.abc import Iterable

LANES = {
    "trainer-": "a rank of the trainer: what it computes, and where it waits for groups",
    "trainer-*bubble": "the same rank, idle inside a pipelined window",
    "scorer-": "a rank of a frozen model on devices of its own: which groups it scores",
    "instance-": "the responses that this rollout instance samples, a row for each that runs at the same time",
    "instances": "weights on their way to all instances",
    "pool ": "the state of an instance: whether it takes prompts",
    "verifier": "the calls of the reward",
}
"""What a lane shows, by the beginning of its name. Other lanes are instances that joined under a name of their own."""

KINDS = {
    "rollout": "a response is sampled",
    "verify": "a response is scored",
    "wait": "the trainer waits for a group",
    "train": "forward and backward pass of a window of groups",
    "score": "log-probabilities under the old policy or the reference",
    "evaluate": "a benchmark is sampled",
    "bubble": "idle between the micro-batches of a pipeline",
    "update": "gradients are reduced and the optimizer makes its step",
    "sync": "new weights go to the instances",
    "check": "trainer and instances compare log-probabilities of fixed tokens",
    "checkpoint": "the state is copied for a checkpoint",
    "serving": "takes prompts",
    "updating": "gets weights, takes no prompts",
    "starting": "loads its model",
    "draining": "finishes its responses and leaves",
    "silent": "does not answer, takes no prompts",
}
"""What a bar shows, by its name."""


def lane(name: str) -> str:
    """What the lane shows."""
    if name.startswith("trainer-") and name.endswith(" bubble"):
        return LANES["trainer-*bubble"]
    return next((text for start, text in LANES.items() if name.startswith(start)), LANES["instance-"])


def legend(lanes: Iterable[str], kinds: Iterable[str]) -> list[tuple[str, str]]:
    """(name, meaning) of the lanes and then of the bars of a page. Lanes that show the same share one entry."""
    shared: dict[str, list[str]] = {}
    for name in lanes:
        shared.setdefault(lane(name), []).append(name)
    named = [(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", text) for text, names in shared.items()]
    return [*named, *((kind, KINDS[kind]) for kind in kinds if kind in KINDS)]
