"""The NPUs of the cluster as one global concurrency limit: a run takes all that it needs at once, or waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.concurrency.sync import concurrency

from engine.config import Config
from engine.errors import DeadlineError

LIMIT = "ascend-npus"
"""Name of the limit; `metronome deploy --npus N` makes it."""
LEASE_S = 120.0
"""A run that was killed gives its NPUs back after so long; Prefect's default is 300 s. A living run renews after 90 s, and
tries three times within some seconds: a server that is away longer than that at that moment costs the run its lease."""
WAIT_S = 24 * 3600.0
"""A run that got no NPUs within a day gives up."""
NPU_MANAGER = Path("/dev/davinci_manager")
"""Device file of Ascend's driver."""


def npus(config: Config, pool_instances: int = 0, training: bool = True) -> int:
    """NPUs of a run in all: trainer ranks and rollout instances, those on the rollout pool too; 0 on other devices."""
    device = config.platform.device
    if device not in ("npu", "auto") or (device == "auto" and not NPU_MANAGER.exists()):
        return 0
    instances = (config.rollout.instances + pool_instances) * config.rollout.tensor
    return instances + (config.parallel.ranks if training else 0)


@contextmanager
def held(count: int, limit: str = LIMIT, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold `count` slots of a limit for the time of the body, all taken in one go: two runs never wait for each other's rest.

    The limit must exist, and a run that loses its lease is ended: two runs on one NPU would both fail. Raises DeadlineError.
    """
    if not count:
        yield
        return
    slots = concurrency(limit, occupy=count, timeout_seconds=wait_s, strict=True, lease_duration=LEASE_S)
    with ExitStack() as stack:
        try:
            stack.enter_context(slots)
        except TimeoutError:
            raise DeadlineError(f"{count} slots of the limit {limit} were not free within {wait_s:.0f} s") from None
        yield
