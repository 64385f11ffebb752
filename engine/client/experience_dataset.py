"""The streaming loader of AsyncFlow §3.4 (Code 1): the groups of a step as a `torch.utils.data.IterableDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from engine.client.service import ExperienceLease, ServiceClient
from engine.errors import BadInput
from engine.types import Group

COLUMNS: dict[str, Callable[[Group], Any]] = {
    "prompt": lambda group: torch.tensor(group.prompt.token_ids),
    "responses": lambda group: [torch.tensor(response.token_ids) for response in group.responses],
    "logprobs": lambda group: [torch.tensor(response.logprobs) for response in group.responses],
    "loss_mask": lambda group: [torch.tensor(response.loss_mask) for response in group.responses],
    "rewards": lambda group: torch.tensor([score.value for score in group.scores]),
    "lengths": lambda group: torch.tensor([len(response.token_ids) for response in group.responses]),
    "versions": lambda group: [response.versions for response in group.responses],
    "index": lambda group: group.index,
}
"""Columns of a group of G responses by their names: "prompt" [P] int64; "responses", "logprobs" and "loss_mask" G
tensors of each response's own length, without padding; "rewards" and "lengths" [G]; "versions" as of `Response`;
"index", the group's place in the step."""


class ExperienceDataset(IterableDataset[dict[str, Any]]):
    """The groups of one step as they arrive: a dict of columns each. It ends when all groups of the step are trained.

    Asking for the next group says that the ones before are trained, as in a loop that trains each group before it takes
    the next: a window is acknowledged when the group after its last one is asked for. A
    `torch.utils.data.DataLoader` around it needs `batch_size=None` and no workers.
    """

    def __init__(
        self, service: ServiceClient, step: int, columns: Sequence[str] = tuple(COLUMNS), consumer: str = "trainer"
    ) -> None:
        """Raises BadInput for a column that there is not."""
        if unknown := sorted(set(columns) - set(COLUMNS)):
            raise BadInput(f"columns {', '.join(unknown)}: there are {', '.join(COLUMNS)}")
        self._service = service
        self._step = step
        self._columns = tuple(columns)
        self._consumer = consumer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the groups. Raises BadInput in a worker process of a loader, which would run ahead."""
        if get_worker_info() is not None:
            raise BadInput("ExperienceDataset: give the DataLoader num_workers=0; a worker acknowledges too early")
        for lease in leases(self._service, self._step, self._consumer):
            for group in lease.groups:
                yield {name: COLUMNS[name](group) for name in self._columns}


def leases(service: ServiceClient, step: int, consumer: str) -> Iterator[ExperienceLease]:
    """Yield the windows of a step, and acknowledge each when the next one is asked for."""
    lease = None
    while (lease := service.get_experience_data(step, consumer, trained=lease)) is not None:
        yield lease
