"""What a run needs of the machine."""

import resource
import shutil
from collections import namedtuple

import numpy
import psutil
import pytest
from safetensors.numpy import save_file

from engine.config import Algorithm, Config, DryRun, Evaluate, Parallel, Platform, Rollout, Run, tree
from engine.errors import BadInput
from engine.run import limits, memory
from engine.tools.dry_run.model_shape import shape_of
from support.runs import config_of

Usage = namedtuple("Usage", "total used free")


def a_config(tmp_path, **tables):
    return Config(run=Run(name="mine", output=str(tmp_path)), **tables)


def test_a_machine_that_has_enough_is_accepted(tmp_path):
    limits.check_limits(a_config(tmp_path), 1000)


@pytest.mark.parametrize(("instances", "concurrency", "need"), [(20, 20, "3"), (64, 8, "4")])
def test_open_files_are_counted_before_the_start(tmp_path, monkeypatch, instances, concurrency, need):
    """The second: 64 responses in flight on each of 64 instances. Exactly enough is enough."""
    config = a_config(tmp_path, rollout=Rollout(instances=instances, concurrency=concurrency, group_size=8))
    enough = limits.open_files(config)
    assert enough > instances * concurrency * 8
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, enough))
    limits.check_limits(config, 0)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, enough - 1))
    said = rf"open files: the run needs {need},\d+ .*there are {enough - 1:,}; raise the hard limit"
    with pytest.raises(BadInput, match=said):
        limits.check_limits(config, 0)


def test_instances_that_join_are_counted_and_samples_of_an_evaluation(monkeypatch):
    large = Config(rollout=Rollout(concurrency=8, group_size=8, instances=0), dry_run=DryRun(joining=64))
    monkeypatch.setattr(limits, "reachable_limit", lambda: 65_536)
    limits.check_open_files(large)
    monkeypatch.setattr(limits, "reachable_limit", lambda: 4096)
    with pytest.raises(BadInput, match=r"open files: the run needs 4,5\d\d .*there are 4,096"):
        limits.check_open_files(large)
    more = Config(evaluate=Evaluate(samples=1024))
    assert limits.open_files(more) > more.rollout.concurrency * 1024
    one_group = Config(rollout=Rollout(concurrency=1, group_size=8, instances=100), evaluate=Evaluate(samples=64))
    assert limits.open_files(one_group) > 100 * (7 + 64) + 100 * 4
    monkeypatch.setattr(limits, "reachable_limit", lambda: 1024)
    limits.check_open_files(Config())


def test_the_ranks_of_a_scorer_are_counted(monkeypatch):
    monkeypatch.setattr(tree, "usable_cores", lambda: {0})
    with_scorer = config_of(
        {"algorithm.kl_coef": 0.1, "stages.reference.tensor": 2, "stages.reference.data": 2, "platform.device": "cuda"}
    )
    assert limits.count_threads(with_scorer) - limits.count_threads(Config()) == 4 * (1 + limits.OWN_THREADS)
    assert limits.shared_memory(with_scorer) == 4 * limits.RANK_SHARED


def test_processes_are_counted(tmp_path, monkeypatch):
    pids = tmp_path / "pids.max"
    pids.write_text("100\n")
    (tmp_path / "pids.current").write_text("90\n")
    monkeypatch.setattr(limits, "PIDS", pids)
    with pytest.raises(BadInput, match=r"processes and threads: the run needs \d+ .*there are 10; raise"):
        limits.check_limits(a_config(tmp_path), 0)


@pytest.mark.parametrize(
    ("tables", "processes"),
    [
        ({}, 0),
        ({"parallel": Parallel(tensor=2)}, 2),
        ({"rollout": Rollout(instances=3, tensor=2, engine="vllm")}, 6),
        ({"parallel": Parallel(tensor=2), "rollout": Rollout(instances=1, tensor=2, engine="vllm")}, 4),
    ],
)
def test_shared_memory_is_for_device_processes_that_are_several(tmp_path, tables, processes):
    for device, each in (("cuda", limits.RANK_SHARED), ("npu", limits.RANK_SHARED), ("cpu", 0)):
        config = a_config(tmp_path, platform=Platform(device=device), **tables)
        assert limits.shared_memory(config) == processes * each


def test_shared_memory_of_a_container(tmp_path, monkeypatch):
    config = a_config(tmp_path, parallel=Parallel(tensor=4), platform=Platform(device="cuda"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 64 * 2**20))
    with pytest.raises(BadInput, match=r"shared memory: the run needs 256\.0 MiB .*there are 64\.0 MiB; .*--shm-size"):
        limits.check_limits(config, 0)


def test_two_checkpoints_and_the_policy_that_do_not_fit_are_refused_by_size(tmp_path, monkeypatch):
    config = a_config(tmp_path, algorithm=Algorithm(old_policy="previous"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 36e9))
    limits.check_limits(config, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 35e9))
    said = r"disk space at .*: the run needs 33.5 GiB \(2 checkpoints of 14.9 GiB, 3.7 GiB of the trained policy\)"
    with pytest.raises(BadInput, match=said):
        limits.check_limits(config, 10**9)


GROUPS = {
    "version 2: above the process": (
        {"a/memory.max": "max", "a/b/memory.max": "max", "memory.max": "1000"},
        "0::/a/b",
        1000,
    ),
    "version 2: its own": ({"a/b/memory.max": "900\n", "memory.max": "1000\n"}, "0::/a/b", 900),
    "version 1": (
        {"memory/a/memory.limit_in_bytes": "800", "cpu/a/memory.limit_in_bytes": "1"},
        "3:cpu:/a\n4:memory:/a",
        800,
    ),
    "version 1, no limit": ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, "4:hugetlb,memory:/", None),
    "a path of the host": ({"memory.max": "700"}, "0::/kubepods/pod1", 700),
    "no cgroup": ({}, None, None),
}


@pytest.mark.parametrize(("files", "groups", "wanted"), GROUPS.values(), ids=GROUPS)
def test_memory_is_the_machines_or_the_cgroups(tmp_path, files, groups, wanted):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    files |= {"proc/self/cgroup": f"{groups}\n"} if groups else {}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.host_memory(tmp_path) == (wanted or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            [],
            r"trainer 3\d[.\d]+ GiB, instances 24[.\d]+ GiB, other processes 1.0 GiB\).*change rollout.conc",
        ),
        (["parallel.data=3"], r"trainer 1\d\d[.\d]+ GiB"),
        (
            ["train.micro_batch_tokens=40000"],
            r"change train.recompute or train.micro.* \(activations of a pro",
        ),
        (["platform.device=auto"], r"trainer 3\d"),
    ],
)
def test_a_cpu_has_the_memory_of_its_machine_for_all_processes_together(monkeypatch, keys, what):
    """platform.memory_gib is an accelerator's. 1.7 G parameters of 16 bytes, and of 4 on the instance."""
    shape = shape_of("Qwen/Qwen3-1.7B")[0]
    config = config_of(
        {"platform.device": "cpu", "train.micro_batch_tokens": 2048} | dict(key.split("=") for key in keys)
    )
    monkeypatch.setattr(memory, "host_memory", lambda: 30.0 * memory.GIB)
    with pytest.raises(BadInput, match=rf"memory of this machine: the run needs [\d.]+ GiB \(.*{what}"):
        limits.check_memory(config, shape)
    monkeypatch.setattr(memory, "host_memory", lambda: 5000.0 * memory.GIB)
    limits.check_memory(config, shape)


def test_parameters_are_counted_in_the_files(tmp_path):
    save_file({"a": numpy.zeros((3, 5), "float16"), "b": numpy.zeros(7, "float32")}, tmp_path / "model.safetensors")
    assert limits.stored_parameters(tmp_path) == 22
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInput, match="damaged safetensors"):
        limits.stored_parameters(tmp_path)
