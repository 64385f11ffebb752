"""What the rank processes of the trainer and of the scorers share: how they start and end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from engine import platform
from engine.client.connection import Connection
from engine.config import Config, Parallel
from engine.errors import MetronomeError
from engine.platform.base import Accelerator, Platform
from engine.run.disk import named_disk_errors
from engine.run.memory import allocator_share
from engine.wire.access_token import access_token
from engine.wire.certificate import own_certificate

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torch's agent looks for a rank's error."""


class WholeErrorFile(ErrorHandler):
    """Writes the traceback of an unexpected error for the agent, in a file that appears only when it is complete.

    When a rank dies, the agent ends the others, which may be writing their errors at that moment. torch's agent fails
    on a partial file, and then nothing would report which rank died.
    """

    def record_exception(self, e: BaseException) -> None:
        """Write the error as torch does, to a partial file in the same folder; then rename it."""
        file = os.environ.get(ERROR_FILE)
        if file is None:
            super().record_exception(e)
            return
        partial = f"{file}.partial"
        os.environ[ERROR_FILE] = partial
        try:
            super().record_exception(e)
        finally:
            os.environ[ERROR_FILE] = file
        os.replace(partial, file)


def run_recorded(main: Callable[[], int]) -> int:
    """Run a rank's `main` and return its exit code. The message of an unexpected error reaches the agent."""
    return record(main, WholeErrorFile())() or 0


def own_share(cores: Sequence[int], ranks: int) -> list[int]:
    """Return this rank's share of the cores that are divided among the `ranks` ranks of this node."""
    share = len(cores) // ranks
    first = int(os.environ["LOCAL_RANK"]) * share
    return list(cores[first : first + share])


def open_session(config: Config, layout: Parallel) -> AbstractContextManager[torch.device]:
    """Return `platform.parallel_session` for this rank of the layout. Seeds numpy's stream, too, from which a function
    of the user's may draw."""
    machine = platform.get_platform(config.platform.device)
    if config.train.deterministic:
        machine.make_deterministic()
    np.random.seed(config.run.seed % 2**32)
    return platform.parallel_session(
        machine,
        config.run.seed,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        timeout_s=config.train.timeout_s,
    )


def leave_memory(config: Config, machine: Platform) -> None:
    """Limit what this rank allocates to what vLLM leaves of their device, where they share it."""
    if config.rollout.share_devices and isinstance(machine, Accelerator):
        device = machine.device(int(os.environ.get("LOCAL_RANK", "0")))
        held = machine.api().get_device_properties(device).total_memory
        machine.api().set_per_process_memory_fraction(allocator_share(config, held), device)


def connect_rank(config: Config, url: str, name: str) -> Connection:
    """Return a rank's connection to the plane at `url`. `name`: the rank's name, for messages."""
    return Connection(
        url=url,
        token=access_token(),
        name=name,
        timeout_s=config.transfer_timeout_s,
        certificate=own_certificate(),
    )


def run_rank(
    folder: Path,
    plane: Connection,
    stage: str,
    session: Callable[[], AbstractContextManager[torch.device]],
    work: Callable[[], None],
) -> int:
    """Do a rank's work inside its session. Return 0, or 1 after a MetronomeError, which is reported to the plane as the
    stage's. `folder`: the run folder."""
    try:
        with named_disk_errors(folder), session():
            work()
        return 0
    except MetronomeError as error:
        plane.tell_failure(error, stage)
        return 1
    finally:
        plane.close()
