"""What distinguishes the modes: when training may begin, and which weight versions a step's responses may carry."""

from __future__ import annotations

from engine.errors import StaleRolloutError
from engine.types import Group


def accepted_versions(mode: str, step: int) -> range:
    """Weight versions that responses of a step may carry (contract 1): in sync and periodic exactly the step's own."""
    return range(step, step + 1)


def check_versions(group: Group, mode: str) -> None:
    """Raise StaleRolloutError if any token of the group was sampled from a version that the mode does not accept."""
    accepted = accepted_versions(mode, group.step)
    for number, response in enumerate(group.responses):
        for _, version in response.versions:
            if version not in accepted:
                raise StaleRolloutError(
                    f"step {group.step}, prompt {group.prompt.id}, response {number} of {response.instance}: sampled from "
                    f"weight version {version}, but mode {mode!r} accepts only "
                    f"{accepted.start if len(accepted) == 1 else f'{accepted.start} to {accepted.stop - 1}'}"
                )
