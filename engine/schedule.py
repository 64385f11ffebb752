"""What distinguishes the modes: when a batch is started, and which weight versions its responses may carry."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import Train
from engine.errors import StaleRolloutError
from engine.types import Group, Response


@dataclass(frozen=True)
class Schedule:
    """When batches are started, seen from the step that is trained."""

    mode: str
    ahead: int = 0
    """So many batches beyond the step's own are in flight while it trains; also the largest staleness."""
    exact: bool = True
    """Weights move only when every batch in flight is generated, so each batch has one version:
    max(0, step − ahead)."""

    @staticmethod
    def of(train: Train, partial: bool = False) -> Schedule:
        """`sync` and `periodic` train what the step's weights sampled; `one_step_off` (verl's recipe) and `bounded`
        (AsyncFlow §4.2) keep batches in flight, on purpose. `partial` is rollout.partial's: weights never wait for a
        response then."""
        if train.mode == "one_step_off":
            return Schedule(train.mode, 1, not partial)
        if train.mode == "bounded":
            return Schedule(train.mode, train.max_staleness, train.exact_lag)
        return Schedule(train.mode)

    def due(self, step: int, start: int, steps: int) -> range:
        """Batches to start once the step's weights are published; the run began, or was resumed, with step `start`."""
        first = step if step == start else step + self.ahead
        return range(first, min(step + self.ahead, steps - 1) + 1)

    def accepted(self, step: int) -> range:
        """Weight versions that responses of a step may carry: at most `ahead` before the step's own.

        A batch that was in flight when a run stopped is generated anew by the resumed run, under newer weights.
        """
        return range(max(0, step - self.ahead), step + 1)

    def check(self, group: Group) -> None:
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


def staleness(step: int, response: Response) -> int:
    """Updates between the weights that sampled the response's oldest token and those that train it;
    0 for an empty one."""
    return step - min((version for _, version in response.versions), default=step)
