"""Places of ranks, and the CPU channel between them, in worlds of four real ranks (gloo): one Python, forked."""

import json
import math
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[4]
WORLD = 4
LAYOUTS = {
    "tensor and data": {"tensor": 2},
    "pipeline and data": {"pipeline": 2},
    "context and data": {"context": 2},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "data": {},
    "experts of two replicas": {"expert": 2},
}
LOCKSTEP = {"experts of two replicas": 2}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the ranks say of themselves and to each other: by layout, then a list by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    # as the elastic agent's
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in LAYOUTS]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), *(str(store.port) for store in stores)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: [rank[name] for rank in ranks] for name in LAYOUTS}


# Megatron's order: rank = tensor + TP (context + CP (data + DP stage)). Per rank: its replica group; then who ...
PLACES = {
    #                     replica groups         lead    feed          judge         write   export
    "tensor and data": ([0, 0, 1, 1], [0, 2], [0, 2], [0, 2], [0], [0, 1]),
    "pipeline and data": ([0, 1, 0, 1], [0, 1], [0, 1], [2, 3], [0, 2], [0, 2]),
    "context and data": ([0, 0, 1, 1], [0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0], [0]),
    "tensor and pipeline": ([0, 0, 0, 0], [0], [0], [2], [0, 2], [0, 1, 2, 3]),
    "data": ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0], [0]),
    "experts of two replicas": ([0, 0, 1, 1], [0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0], [0, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_places(told, layout):
    ranks = told[layout]
    replica_groups, *roles = PLACES[layout]
    assert [rank["replica_group"] for rank in ranks] == replica_groups
    assert [rank["replica_groups"] for rank in ranks] == [max(replica_groups) + 1] * WORLD
    for role, expected in zip(("leader", "feeds", "judges", "writes", "exports"), roles, strict=True):
        assert [number for number, rank in enumerate(ranks) if rank[role]] == expected, role
    assert [rank["share"] for rank in ranks] == ([0, 1, 0, 1] if layout in LOCKSTEP else [0] * WORLD)
    assert [rank["stage"] for rank in ranks] == ([0, 0, 1, 1] if "pipeline" in layout else [0] * WORLD)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_unit_hears_its_leader_and_everyone_the_first(told, layout):
    replica_groups, leaders, *_ = PLACES[layout]
    for number, rank in enumerate(told[layout]):
        assert rank["from_leader"] == rank["from_leader_beside"] == leaders[replica_groups[number]]
        assert rank["from_first"] == 0
        assert [message["rank"] for message in rank["gathered"]] == list(range(WORLD))
        assert [len(message["text"]) for message in rank["gathered"]] == [1, 10, 100, 1000]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_of_the_leader_ends_its_unit_and_no_other(told, layout):
    replica_groups = PLACES[layout][0]
    assert [rank["failed"] for rank in told[layout]] == [
        "BadInput: replica group 0 is out" if replica_group == 0 else replica_group for replica_group in replica_groups
    ]
    assert [rank["failed_first"] for rank in told[layout]] == ["RewardError: rank 0 is out"] * WORLD


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_worst_of_a_unit_hides_no_nan(told, layout):
    replica_groups = PLACES[layout][0]
    for number, rank in enumerate(told[layout]):
        assert rank["worst"] == max(other for other in range(WORLD) if replica_groups[other] == replica_groups[number])
        assert rank["worst_of_all"] == math.inf  # rank 1 had NaN


def _rank(number, folder, ports):
    import torch

    from engine import platform
    from support.parallel.two_ranks import rank_environment

    torch.set_num_threads(1)
    os.environ |= rank_environment(number, WORLD, local=number)
    found = {}
    for (name, sizes), port in zip(LAYOUTS.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = port  # in a store that has been used, ranks would find each other's old addresses
        with platform.parallel_session(platform.get_platform("cpu"), 0, timeout_s=60.0, **sizes):
            found[name] = _said(LOCKSTEP.get(name, 1))
    Path(folder, f"{number}.json").write_text(json.dumps(found))


def _said(lockstep):
    from engine.errors import BadInput, MetronomeError, RewardError
    from engine.trainer.ranks.rank_group import RankGroup
    from engine.wire.messages import BucketInfo, CheckpointDue

    ranks = RankGroup(lockstep, 60.0)

    def bucket(number, text):
        return BucketInfo(
            transport=text, version=0, stage=0, bucket=number, names=[], dtypes=[], shapes=[], checksum=""
        )

    mine = bucket(ranks.rank, "x" * 10**ranks.rank)

    def fail():
        if ranks.replica_group == 0:
            raise BadInput("replica group 0 is out")
        return CheckpointDue(True, ranks.replica_group)

    def fail_first():
        raise RewardError(f"rank {ranks.rank} is out")

    def tried(call, act):
        try:
            return call(act).updates
        except MetronomeError as error:
            return f"{type(error).__name__}: {error}"

    names = ["replica_group", "replica_groups", "share", "leader", "feeds", "judges", "writes", "exports", "stage"]
    places = {name: getattr(ranks, name) for name in names}
    return places | {
        "from_leader": ranks.from_leader(lambda: CheckpointDue(True, ranks.rank)).updates,
        "from_leader_beside": ranks.from_leader_beside(lambda: CheckpointDue(True, ranks.rank)).updates,
        "from_first": ranks.from_first(lambda: CheckpointDue(True, ranks.rank)).updates,
        "gathered": [{"rank": one.bucket, "text": one.transport} for one in ranks.gather(mine)],
        "failed": tried(ranks.from_leader, fail),
        "failed_first": tried(ranks.from_first, fail_first),
        "worst": ranks.worst(float(ranks.rank)),
        "worst_of_all": ranks.worst(math.nan if ranks.rank == 1 else 1.0, everyone=True),
    }


def _main(folder, ports):
    """Import once, then fork: four imports of torch and Megatron would take most of the time."""
    import engine.trainer.rank  # noqa: F401

    children = []
    for number in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(number, folder, ports)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
