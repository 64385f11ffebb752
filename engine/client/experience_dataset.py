"""The streaming loader of AsyncFlow §3.4 (Code 1): the groups of a step as a `torch.utils.data.IterableDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from engine.client.service import ExperienceLease, ServiceClient
from engine.errors import BadInput
from engine.types import Group
from engine.wire.columns import LOGPROBS, PROMPT, RESPONSES, SCORES

VALUES: dict[str, tuple[str, Callable[[Group], Any]]] = {
    "responses": (RESPONSES, lambda group: [torch.tensor(list(one.token_ids)) for one in group.responses]),
    "logprobs": (LOGPROBS, lambda group: [torch.tensor(list(one.logprobs)) for one in group.responses]),
    "loss_mask": (RESPONSES, lambda group: [torch.tensor(list(one.loss_mask)) for one in group.responses]),
    "rewards": (SCORES, lambda group: torch.tensor([score.value for score in group.scores])),
    "excluded": (SCORES, lambda group: torch.tensor([score.excluded for score in group.scores])),
    "lengths": (RESPONSES, lambda group: torch.tensor([len(one.token_ids) for one in group.responses])),
    "versions": (RESPONSES, lambda group: [one.versions for one in group.responses]),
}
"""Values of a group of G responses: the column from which each value is read, and how to read it."""
COLUMNS = ("prompt", *VALUES, "index")
"""Names of the values. "prompt": [P] int64. "responses", "logprobs" and "loss_mask": G tensors with each response's
length, without padding. "rewards", "lengths" and "excluded" (bool: the reward is not known): [G]. "versions": as in
`Response`. "index": the group's place in the step. Columns that other stages write keep their names, with shape [G] or
[sum of lengths]."""


class ExperienceDataset(IterableDataset[dict[str, Any]]):
    """The groups of one step as they arrive, each as a dict of columns. Iteration ends when all groups of the step are
    trained. Only the requested columns are transferred.

    Asking for the next group means that the previous ones are trained, as in a loop that trains each group before it
    takes the next: a window is acknowledged when the group after its last one is requested. A
    `torch.utils.data.DataLoader` around this dataset needs `batch_size=None` and no workers.
    """

    def __init__(
        self, service: ServiceClient, step: int, columns: Sequence[str] = COLUMNS, consumer: str = "trainer"
    ) -> None:
        """Raises BadInput for an unknown column."""
        further = [name for stage in service.config.stages.values() for name in stage.gives]
        if unknown := sorted(set(columns) - {*COLUMNS, *further}):
            raise BadInput(f"columns {', '.join(unknown)}: available are {', '.join([*COLUMNS, *further])}")
        self._service = service
        self._step = step
        self._columns = tuple(columns)
        self._consumer = consumer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the groups. Raises BadInput in a worker process of a loader, because it would run ahead."""
        if get_worker_info() is not None:
            raise BadInput("ExperienceDataset: give the DataLoader num_workers=0; a worker would acknowledge too early")
        lease = None
        while (lease := self._next_lease(lease)) is not None:
            yield from self._opened(lease)

    def _next_lease(self, last: ExperienceLease | None) -> ExperienceLease | None:
        return self._service.get_experience_data(
            self._step, self._consumer, trained=last, columns=sorted(self._sources())
        )

    def _sources(self) -> set[str]:
        """Return the plane's columns from which the values are read."""
        return {VALUES[name][0] if name in VALUES else name for name in self._columns if name != "index"} or {PROMPT}

    def _opened(self, lease: ExperienceLease) -> Iterator[dict[str, Any]]:
        """Yield the values of each row of a lease."""
        for row, group in zip(lease.rows, lease.groups, strict=True):
            found: dict[str, Any] = {}
            for name in self._columns:
                if name == "index":
                    found[name] = row.index
                elif name == "prompt":
                    found[name] = torch.tensor(list(group.prompt.token_ids))
                elif name in VALUES:
                    found[name] = VALUES[name][1](group)
                else:
                    found[name] = torch.from_numpy(group.columns[name].copy())
            yield found
