"""What the ranks train in the parallel tests: cases, and the groups that they share with the reference."""

import random
from dataclasses import dataclass, field, replace

import numpy as np

from engine.types import Group, Prompt, Response, Score
from support.policies import response

# 61 is padded under tensor parallelism
VOCABULARY = 61
CONTEXT = 128
LARGE = 4096
SMALL = 24
"""Token budgets of a micro-batch: everything packed into one row, or nearly every response in a row of its own."""

GROUP_SETS = {
    "mixed": [(9, (7, 3, 12, 5)), (4, (4, 0, 16, 1)), (13, (2, 9))],
    "many": [(6, (5, 3, 9, 2)), (11, (6, 1)), (3, (8, 0, 4)), (7, (2, 2, 13, 6)), (5, (10, 3))],
    "one": [(9, (11,)), (1, (1,)), (5, (30,))],
    "two": [(9, (CONTEXT - 9, 1)), (1, (6, 0))],
    "eight": [(12, (1, 2, CONTEXT - 12, 0, 33, 5, 5, 17))],
    "few": [(6, (9, 4))],
}
"""(tokens of the prompt, tokens of each response) of each group; "one", "two" and "eight" responses of very different
lengths, among them an empty one and one that ends at the model's limit."""

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """One step of one policy in one layout."""

    name: str
    layout: dict[str, int | bool]
    kind: str = "qwen3"
    tied: bool = False
    shared: bool = True
    budget: int = LARGE
    temperature: float = 1.0
    loss: str = "plain"
    """"plain" is the policy gradient; "full" has ratios to an old policy, clipping, KL and entropy; "rollout" has
    ratios to the instance's log-probabilities, and clipping."""
    groups: str = "mixed"
    deal: tuple[Windows, ...] = ()
    """The windows of each replica group, each a tuple of group numbers; () deals one group per window, in turn."""
    before: str = ""
    """Groups of a step that is trained first, with an update too small to be seen; "" for none."""
    settings: dict[str, object] = field(default_factory=dict)
    routed: bool = False
    """Whether the groups have routes of a mixture of two layers and four experts."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the model, where they are not the tiny models' own."""
    block: int = 0
    """Tokens of oneDNN's blocks, whatever the products' size; 0 leaves products as small as these to torch."""
    tolerance: float = 1e-5

    @property
    def world(self) -> int:
        """Ranks."""
        sizes = [self.layout.get(name, 1) for name in ("tensor", "pipeline", "context", "data")]
        return sizes[0] * sizes[1] * sizes[2] * sizes[3]

    @property
    def model(self) -> str:
        """Name of its folder."""
        return "-".join(
            [self.kind, "tied" if self.tied else "untied", *(f"{key}={size}" for key, size in self.sizes.items())]
        )

    def windows(self, replica_group: int, replica_groups: int) -> Windows:
        """What a replica group trains, in order."""
        if self.deal:
            return self.deal[replica_group] if replica_group < len(self.deal) else ()
        return tuple(
            (index,) for index in range(len(GROUP_SETS[self.groups])) if index % replica_groups == replica_group
        )


OLD_SCALE = 0.93
REFERENCE_SCALE = 1.07
"""In the full loss old policy and reference are the policy with all weights times this: the same in every layout."""
KL_COEF = 0.05
ENTROPY_COEF = 0.02
CLIP = 0.2


def make_groups(name: str, routed: bool = False) -> list[Group]:
    """The groups of a set, the same in every process; `routed`: as of `Case`."""
    draw = random.Random(name)
    groups = [_group(draw, index, prompt, lengths) for index, (prompt, lengths) in enumerate(GROUP_SETS[name])]
    return list(map(_with_routes, groups)) if routed else groups


def _with_routes(group: Group) -> Group:
    tokens = len(group.prompt.token_ids) + sum(len(response.token_ids) for response in group.responses)
    routes = np.random.default_rng(group.index).random((tokens, 2, 4)).argsort()[..., :2].astype(np.uint8)
    return replace(group, columns={"routes": routes})


def _group(draw: random.Random, index: int, prompt: int, lengths: tuple[int, ...]) -> Group:
    def ids(length: int) -> tuple[int, ...]:
        # transformers trains no embedding of its padding, 1
        return tuple(draw.randrange(2, VOCABULARY) for _ in range(length))

    def drawn(length: int) -> Response:
        mask = tuple(draw.random() < 0.8 for _ in range(length))
        return response(ids(length), [-4.0 - 0.1 * (place % 5) for place in range(length)], mask)

    question = Prompt(f"p{index}", "", "", ids(prompt))
    return Group(
        step=0,
        index=index,
        prompt=question,
        responses=tuple(map(drawn, lengths)),
        scores=tuple(Score(draw.random()) for _ in lengths),
    )
