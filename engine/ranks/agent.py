"""Starts a node's ranks of the trainer, or of a scorer, under torch's elastic agent.

`python -m engine.ranks.agent --ranks N [--module MODULE] -- <rank arguments>`

The agent is a process of its own. It ends with the launcher, and the ranks end with it (engine.run.process). Several
nodes have one agent each; these meet at the rendezvous that the launcher's node holds (engine.ranks.nodes).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engine.ranks.rendezvous import BACKEND, register
from engine.run.commands import TRAINER_RANK
from engine.run.process import LIFELINE, hold_lifeline, watch_lifeline

KILL_S = 2
"""Seconds that a rank has to end before it is killed. A rank that hangs may not notice its lifeline either."""


def main() -> int:
    """Run the ranks until they end. Return 0 if all succeeded, else 1."""
    watch_lifeline()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rendezvous", default="127.0.0.1:0", help="host:port on the launcher's node")
    parser.add_argument("--run-id", default=uuid.uuid4().hex, help="what the nodes of a run have in common")
    parser.add_argument("--module", default=TRAINER_RANK, help="what each rank runs")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    rest = arguments.rest[1:] if arguments.rest[:1] == ["--"] else arguments.rest
    return run_ranks(
        ranks=arguments.ranks,
        arguments=rest,
        nodes=arguments.nodes,
        rendezvous=arguments.rendezvous,
        run_id=arguments.run_id,
        serves=True,
        module=arguments.module,
    )


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    nodes: int,
    rendezvous: str,
    run_id: str,
    serves: bool,
    module: str = TRAINER_RANK,
) -> int:
    """Run this node's ranks until they end. Return 0 if all succeeded; else print the error and return 1.

    `serves`: whether the store at `rendezvous`, where the nodes and the ranks meet, is this node's; `module`: what each
    rank runs.
    """
    name = module.split(".")[1]
    register()
    _kill_soon()
    os.environ[LIFELINE] = hold_lifeline()  # the ranks watch the agent, not the launcher
    launch = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend=BACKEND,
        rdzv_endpoint=rendezvous,
        rdzv_configs={"serves": serves},
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = _first_failure(error)
        print(f"{name} rank {rank}: {failure.message}", file=sys.stderr)
        return 1
    except RendezvousError as error:
        print(f"the nodes did not meet at {rendezvous}: {error}", file=sys.stderr)
        return 1
    except SignalException as ended:
        print(f"the {name} ranks are ended: {signal.Signals(ended.sigval).name}", file=sys.stderr)
        return 1
    return 0


def _kill_soon() -> None:
    """Let torch wait KILL_S before it kills a rank, not 30 s.

    When a signal ends the agent, torch reads the environment. When a rank has failed, and always before torch 2.13, it
    takes the default of `PContext.close`, for which it has no setting.
    """
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(KILL_S)
    PContext.close.__defaults__ = (None, KILL_S)


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    A rank that a signal ended counts as first: the others exit because they lose their connection to it. SIGTERM does
    not count, because this agent sends it to the others. torch's times can't tell, since they are whole seconds.
    """
    others = (-signal.SIGTERM, *range(256))
    return min(error.failures.items(), key=lambda item: (item[1].exitcode in others, item[1].timestamp))


if __name__ == "__main__":
    sys.exit(main())
