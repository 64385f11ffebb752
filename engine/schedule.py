"""The difference between the modes: when a batch starts, and which weight versions its responses may have."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import Train
from engine.errors import StaleRolloutError
from engine.types import Group, Response


@dataclass(frozen=True)
class Schedule:
    """When batches start, relative to the step being trained, and which versions are accepted."""

    mode: str
    ahead: int = 0
    """Number of batches in flight during a step, in addition to the step's own. Also the largest staleness."""
    exact: bool = True
    """Whether new weights wait until every batch in flight is generated. Each batch then has a single version: max(0,
    step − ahead)."""

    @staticmethod
    def of(train: Train, partial: bool = False) -> Schedule:
        """The schedule of a mode.

        `sync` and `periodic` train responses of the step's own weights. `one_step_off` (verl's recipe) and `bounded`
        (AsyncFlow §4.2) keep batches in flight. `partial`: rollout.partial; weights then never wait for a response.
        """
        if train.mode == "one_step_off":
            return Schedule(train.mode, 1, not partial)
        if train.mode == "bounded":
            return Schedule(train.mode, train.max_staleness, train.exact_lag)
        return Schedule(train.mode)

    def due(self, step: int, start: int, steps: int) -> range:
        """Batches to start when the step's weights are published. `start`: the step with which the run began or was
        resumed."""
        first = step if step == start else step + self.ahead
        return range(first, min(step + self.ahead, steps - 1) + 1)

    def accepted(self, step: int) -> range:
        """Weight versions that responses of a step may have: at most `ahead` before the step's own.

        A resumed run regenerates the batches that were in flight, with newer weights.
        """
        return range(max(0, step - self.ahead), step + 1)

    def check_versions(self, group: Group) -> None:
        """Raise StaleRolloutError if any token of the group was sampled from a version that is not accepted."""
        accepted = self.accepted(group.step)
        for number, response in enumerate(group.responses):
            for _, version in response.versions:
                if version not in accepted:
                    raise StaleRolloutError(
                        f"step {group.step}, prompt {group.prompt.id}, response {number} of {response.instance}: "
                        f"sampled from weight version {version}, but mode {self.mode!r} accepts only "
                        f"{accepted.start if len(accepted) == 1 else f'{accepted.start} to {accepted.stop - 1}'}"
                    )


def response_staleness(step: int, response: Response) -> int:
    """Number of updates between the weights that sampled the response's oldest token and the weights being trained; 0
    for an empty response."""
    return step - min((version for _, version in response.versions), default=step)
