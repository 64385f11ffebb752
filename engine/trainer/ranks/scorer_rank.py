"""One rank of a scorer, started by torch elastic.

Command: `python -m engine.trainer.ranks.scorer_rank --folder RUN --plane URL --stage NAME`.

Today the only scorer is the reference: the base model of the run, in the layout of [stages.reference].
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

from engine import platform
from engine.client.connection import Connection
from engine.config import Config
from engine.config.placing import scorer_devices
from engine.config.recipe import load_config
from engine.run.process import bind_cores, watch_lifeline
from engine.run.trace import Trace
from engine.trainer.ranks.rank_process import connect_rank, open_session, own_share, run_rank, run_recorded
from engine.wire.columns import REFERENCE


def main() -> int:
    """Set up the rank and score rows until the run is over. Return 0, or 1 after a MetronomeError, which is reported to
    the orchestrator."""
    return run_recorded(_main)


def _main() -> int:
    watch_lifeline()
    arguments = _arguments()
    config = load_config(arguments.folder / "config.toml")
    stage = config.stages[arguments.stage]
    if platform.get_platform(config.platform.device).name == "cpu":
        bind_cores(own_share(stage.devices, stage.ranks))
    else:  # a rank finds its accelerator by LOCAL_RANK
        os.environ["LOCAL_RANK"] = str(scorer_devices(config)[int(os.environ["LOCAL_RANK"])])
    torch.set_num_threads(arguments.threads)
    plane = connect_rank(config, arguments.plane, _name(arguments.stage))
    return run_rank(
        folder=arguments.folder,
        plane=plane,
        stage=arguments.stage,
        session=partial(open_session, config, config.stage_layout(arguments.stage)),
        work=partial(_score, config, arguments, plane),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="run folder with config.toml")
    parser.add_argument("--plane", required=True, help="URL of the orchestrator's server")
    parser.add_argument("--stage", required=True, help="name of the stage: reference")
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def _name(stage: str) -> str:
    return f"scorer-{stage}-{os.environ['RANK']}"


def _score(config: Config, arguments: argparse.Namespace, plane: Connection) -> None:
    """Load the stage's model and serve the stage."""
    from engine.trainer.ranks.rank_group import RankGroup
    from engine.trainer.ranks.scorer import Scorer

    scorer = Scorer(
        config=config,
        platform=platform.get_platform(config.platform.device),
        ranks=RankGroup(timeout_s=config.transfer_timeout_s),
        model=Path(config.model.path),
        stage=arguments.stage,
        column=REFERENCE,
        trace=Trace(arguments.folder / "trace", _name(arguments.stage)),
    )
    scorer.serve(plane)


if __name__ == "__main__":
    sys.exit(main())
