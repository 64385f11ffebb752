"""Starts a node's trainer ranks under torch's elastic agent.

`python -m engine.trainer.agent --ranks N -- <rank arguments>`

The agent is a process of its own: it dies with the launcher, and the ranks with it (engine.run.process). With several
nodes there is one agent on each; they meet at the rendezvous that the launcher's node holds (engine.trainer.nodes).
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.run.process import LIFELINE, hold_lifeline, watch_lifeline

KILL_S = 2
"""What a rank that was told to end may take before it is killed: one that hangs may not hear its lifeline either."""
JOIN_S = 600
"""What the other nodes may take to come to the rendezvous."""


def main() -> int:
    """Run the ranks to their end; 0 when all succeeded."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rendezvous", default="localhost:0", help="host:port on the launcher's node")
    parser.add_argument("--run-id", default=uuid.uuid4().hex, help="what the nodes of a run have in common")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    rest = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    # a laptop's name may not resolve
    address = "127.0.0.1" if arguments.nodes == 1 else arguments.rendezvous.rpartition(":")[0]
    return run_ranks(
        ranks=arguments.ranks,
        arguments=rest,
        nodes=arguments.nodes,
        rendezvous=arguments.rendezvous,
        run_id=arguments.run_id,
        address=address,
        host=True,
    )


def run_ranks(
    ranks: int, arguments: Sequence[str], nodes: int, rendezvous: str, run_id: str, address: str, host: bool
) -> int:
    """Run this node's ranks to their end; 0 when all succeeded. `address`: this node's; `host`:
    it holds the rendezvous."""
    os.environ[LIFELINE] = hold_lifeline()  # the ranks watch the agent, not the launcher
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        rdzv_configs={} if nodes == 1 else {"is_host": host, "join_timeout": JOIN_S},
        max_restarts=0,
        local_addr=address,
        monitor_interval=0.1,
        shutdown_timeout=KILL_S,
    )
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", "engine.trainer.rank", *arguments)
    except ChildFailedError as error:
        rank, failure = _first(error)
        print(f"trainer rank {rank}: {failure.message}", file=sys.stderr)
        return 1
    except RendezvousError as error:
        print(f"the nodes did not meet at {rendezvous}: {error}", file=sys.stderr)
        return 1
    return 0


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that failed, not one that lost its connection to it: torch's times are whole seconds, often the same."""
    return min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))


if __name__ == "__main__":
    sys.exit(main())
