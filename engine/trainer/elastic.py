"""Starts the trainer ranks under torch's elastic agent: `python -m engine.trainer.elastic --ranks N -- <rank arguments>`.

The agent is a process of its own: it dies with the launcher, and the ranks with it (engine.process).
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.process import LIFELINE, hold_lifeline, watch_lifeline

KILL_S = 2
"""What a rank that was told to end may take before it is killed: one that hangs may not hear its lifeline either."""


def main() -> int:
    """Run the ranks to their end; 0 when all succeeded."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    os.environ[LIFELINE] = hold_lifeline()  # the ranks watch the agent, not the launcher
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=arguments.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="127.0.0.1",  # a laptop's own name may not resolve
        monitor_interval=0.1,
        shutdown_timeout=KILL_S,
    )
    rest = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", "engine.trainer.rank", *rest)
    except ChildFailedError as error:
        rank, failure = _first(error)
        print(f"trainer rank {rank}: {failure.message}", file=sys.stderr)
        return 1
    return 0


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed, not one that lost its connection to it: torch's times are whole seconds, often the same."""
    return min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))


if __name__ == "__main__":
    sys.exit(main())
