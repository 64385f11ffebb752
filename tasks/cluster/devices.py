"""The NPUs of the cluster as one global concurrency limit. A run takes all the NPUs that it needs at once, or waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from engine.config import Config
from engine.errors import BadInput, DeadlineError

LIMIT = "ascend-npus"
"""Name of the limit; `metronome deploy --npus N` creates it."""
LEASE_S = 120.0
"""Seconds after which the NPUs of a killed run are free again; Prefect's default is 300 s. A living run renews its
lease every 90 s, with three attempts within a few seconds. If the server answers none of them, the run loses its lease.
"""
WAIT_S = 24 * 3600.0
"""Seconds (a day) after which a run that gets no NPUs gives up."""
TOO_MANY = 422
"""HTTP status of Prefect's server for a request of more slots than the limit has in total."""
NPU_MANAGER = Path("/dev/davinci_manager")
"""Device file of Ascend's driver."""


def count_npus(config: Config, pool_instances: int = 0, training: bool = True) -> int:
    """The number of NPUs that a run holds: for its trainer ranks, scorers and rollout instances, or for its evaluations
    if these need more; 0 on other devices.

    `pool_instances`: instances on the rollout pool. Without `training`, the run only evaluates. An evaluation without
    any instance starts one itself (engine.orchestrator.rollout_service).
    """
    device = config.platform.device
    if device not in ("npu", "auto") or (device == "auto" and not NPU_MANAGER.exists()):
        return 0
    instances = config.rollout.instances + pool_instances
    tensor = config.rollout.tensor
    evaluating = max(1, instances) * tensor
    return max(evaluating, config.parallel.ranks + config.scorer_ranks + instances * tensor) if training else evaluating


@contextmanager
def hold_npus(count: int, limit: str = LIMIT, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold `count` slots of a limit during the body. They are all taken at once, so two runs cannot block each other.

    A run that loses its lease is ended, because two runs on one NPU would both fail. Raises DeadlineError after
    `wait_s`, and BadInput if the limit does not exist or is less than `count`.
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
        except ConcurrencySlotAcquisitionError as error:
            if error.__cause__ is None:  # the server has answered, so the limit does not exist
                raise BadInput(
                    f"Prefect has no limit {limit}, of which this run takes {count}: create it by `metronome deploy "
                    "--npus N`, where N is the number of NPUs of the cluster"
                ) from None
            if getattr(getattr(error.__cause__, "response", None), "status_code", None) != TOO_MANY:
                raise
            raise BadInput(
                f"this run needs {count} slots of Prefect's limit {limit}, which has fewer in total: use fewer ranks "
                "and instances, or raise the limit by `metronome deploy --npus N` if the cluster has more NPUs"
            ) from None
        yield
