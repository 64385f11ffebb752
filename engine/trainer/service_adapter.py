"""The Megatron trainer behind the service: `Policy` as a trainer of one process that is driven from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from engine.config import Config
from engine.errors import BadInput
from engine.platform import Platform
from engine.trainer.policy import Policy
from engine.types import Group


class MegatronAdapter:
    """A policy on one rank, with the recipe's loss, optimizer and schedule.

    Built inside a `session` of the platform of one rank (`engine.platform.single`).
    """

    def __init__(self, config: Config, platform: Platform) -> None:
        """Raises BadInput for a recipe with several updates in a step, which a step from outside does not have."""
        if config.train.updates > 1:
            raise BadInput(f"train.updates = {config.train.updates}: a trainer behind the service makes one a step")
        self.policy = Policy(config, platform)
        self.policy.start_step()

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The policy's tensors under Hugging Face names."""
        return self.policy.models.tensors()

    def probe(self, token_ids: list[int]) -> list[float]:
        """The policy's log-probabilities of the tokens after the first."""
        return self.policy.models.probe(token_ids)

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Add the groups' gradient."""
        self.policy.accumulate(groups)

    def update(self, responses: int) -> Mapping[str, float]:
        """Make the update (Algorithm 1, lines 18 to 21)."""
        policy = self.policy
        policy.reduce(responses)
        policy.decide()
        policy.models.copy_policy_to_old()
        norm, rate = policy.update()
        figures = policy.figures()
        policy.start_step()
        shown = {"loss": figures["loss"], "grad_norm": norm, "learning_rate": rate}
        return shown | {"kl": figures["kl"]} if "kl" in figures else shown  # there is none without a reference
