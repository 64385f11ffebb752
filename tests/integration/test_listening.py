"""Whatever a run on one node listens on is loopback: no other machine reaches a socket of any of its processes."""

import sys
from pathlib import Path

import pytest

from support.listening import listening_while
from support.runs import ROOT, overrides, write_config

pytestmark = [pytest.mark.timeout(400)]


@pytest.mark.nightly
@pytest.mark.parallel
def test_a_pipeline_with_two_ranks_and_two_instances_listens_on_loopback_only(settings, tmp_path):
    """Prefect's server, orchestrator, instances, agent, ranks with a broadcast of weights, and both evaluations."""
    run = settings | {
        "run.name": "run",
        "train.steps": 2,
        "parallel.data": 2,
        "rollout.instances": 2,
        "weights.transport": "gloo",
        "rollout.max_new_tokens": 8,
        "evaluate.problems": 4,
        "evaluate.max_new_tokens": 8,
    }
    sets = [part for override in overrides(run) for part in ("--set", override)]
    code, said, seen = listening_while(
        [str(Path(sys.executable).parent / "metronome"), "run", "infra/recipes/quickstart.toml", *sets], 380, cwd=ROOT
    )
    assert code == 0, said
    for part in ("orchestrator.launch", "ranks.agent", "trainer.rank", "instance.embedded", "local_server"):
        assert any(part in name for name in seen.processes), part
    for part in ("orchestrator.launch", "trainer.rank", "instance.embedded", "local_server"):
        assert any(part in name for name in seen.sockets.values()), part
    # the ranks meet in a file of their user: every process of the machine could change a store behind a port
    assert not any("ranks.agent" in name for name in seen.sockets.values())
    assert seen.open_ones == {}


@pytest.mark.slow
def test_a_run_of_one_rank_listens_on_loopback_only(settings, tmp_path):
    config = write_config(settings | {"train.steps": 1, "rollout.max_new_tokens": 4}, tmp_path)
    command = [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)]
    code, said, seen = listening_while(command, 200, cwd=ROOT)
    assert code == 0, said
    assert any("trainer.rank" in name for name in seen.processes)
    assert seen.open_ones == {}
