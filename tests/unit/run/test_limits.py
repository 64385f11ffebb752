"""What a run needs of the machine."""

import resource
import shutil
from collections import namedtuple

import numpy
import pytest
from safetensors.numpy import save_file

from engine.config import Algorithm, Checkpoint, Config, DryRun, Evaluate, Parallel, Platform, Rollout, Run, Train, tree
from engine.errors import BadInput
from engine.run import limits
from engine.run.folder import RunFolder
from engine.types import Group, Prompt, Response, Score
from support.run_folders import a_checkpoint
from support.runs import config_of

Usage = namedtuple("Usage", "total used free")


def a_config(tmp_path, **tables):
    return Config(run=Run(name="mine", output=str(tmp_path)), **tables)


def test_a_machine_that_has_enough_is_accepted(tmp_path):
    limits.check_limits(a_config(tmp_path), 1000)


def test_exactly_enough_is_enough():
    for need, enough in ((3, True), (4, True), (5, False)):
        assert limits.Limit(what="files", need=need, has=4, unit="files", formula="", remedy="").suffices == enough


@pytest.mark.parametrize(("instances", "concurrency", "need"), [(20, 20, "3"), (64, 8, "4")])
def test_open_files_are_counted_before_the_start(tmp_path, monkeypatch, instances, concurrency, need):
    """The second: 64 responses in flight on each of 64 instances."""
    config = a_config(tmp_path, rollout=Rollout(instances=instances, concurrency=concurrency, group_size=8))
    assert limits.open_files(config) > instances * concurrency * 8
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    said = rf"open files: the run needs {need},\d+ .*there are 1,024; raise the hard limit"
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
    monkeypatch.setattr(tree, "usable_cores", lambda: [0])
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


def test_checkpoints_that_do_not_fit_are_refused_by_size(tmp_path, monkeypatch):
    config = a_config(
        tmp_path, train=Train(steps=100), checkpoint=Checkpoint(every=10), algorithm=Algorithm(old_policy="previous")
    )
    count, each = limits.checkpoints_to_come(config, 10**9)
    assert (count, each) == (3, 16e9)  # two are kept while the third is written
    monkeypatch.setattr(limits, "growth_to_come", lambda config: 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 40e9))
    with pytest.raises(BadInput, match=r"disk space at .*: the run needs 48.43 GiB .*there are 37.25 GiB; free space"):
        limits.check_limits(config, 10**9)
    for step in (10, 20):
        a_checkpoint(config.folder / "checkpoints", step)
    limits.check_limits(config, 10**9)  # a resumed run has two already
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 17e9))
    (config.folder / "policy").mkdir()  # of fewer steps; it goes once the next one is whole
    with pytest.raises(BadInput, match=r"the run needs 18.63 GiB \(1 x 14.90 GiB .*, 3.73 GiB of the trained policy"):
        limits.check_limits(config, 10**9)


@pytest.mark.parametrize(
    ("steps", "every", "count"), [(100, 0, 1), (19, 20, 1), (20, 20, 1), (40, 20, 2), (41, 20, 3), (1000, 20, 3)]
)
def test_the_checkpoint_of_the_last_step_is_counted_once(tmp_path, steps, every, count):
    config = a_config(tmp_path, train=Train(steps=steps), checkpoint=Checkpoint(every=every, keep_last=2))
    assert limits.checkpoints_to_come(config, 1000)[0] == count


def test_what_grows_beside_the_checkpoints_is_counted_and_bounded_by_keep_steps(tmp_path, monkeypatch):
    """10,000 steps of 1,024 responses of 4,000 tokens, with AIME24 x 32 every 20 steps."""
    settings = {
        "run.output": str(tmp_path),
        "run.name": "mine",
        "train.steps": 10_000,
        "train.prompts_per_step": 128,
        "rollout.group_size": 8,
        "rollout.max_context": 8192,
        "rollout.max_new_tokens": 4000,
        "evaluate.every": 20,
        "evaluate.problems": 30,
        "evaluate.samples": 32,
        "evaluate.max_new_tokens": 4000,
    }
    whole = limits.growth_to_come(config_of(settings | {"run.keep_steps": 0}))
    assert whole == pytest.approx(3.0e9 + 0.23e9 + 5.3e9 + 5.9e9 + 8.3e9, rel=0.05)
    config = config_of(settings)
    kept = limits.growth_to_come(config)
    assert kept == pytest.approx(whole / 10 + 0.32e9, rel=0.05)  # of spans twice as many steps
    assert limits.growth_to_come(config_of(settings | {"train.record": True})) > 300e9
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1e9))
    with pytest.raises(BadInput, match=r"at most 2\.\d+ GiB of spans, samples, .* or run\.keep_steps"):
        limits.check_limits(config, 1000)
    folder = config.folder / "trace"
    folder.mkdir(parents=True)
    (folder / "trainer-0.jsonl").write_bytes(b" " * 2**20)
    assert kept - limits.growth_to_come(config) == 2**20  # a resume has it already


@pytest.mark.parametrize("program", ["", "mine.py:episode"])
@pytest.mark.parametrize("length", [16, 4000])
def test_the_samples_of_a_step_fit_in_what_is_counted_for_them(tmp_path, program, length):
    """Full responses of tokens with four letters, to problems of which as many fill the context."""
    keys = {"run.output": str(tmp_path), "run.name": "mine", "train.steps": 1, "rollout.group_size": 2}
    keys |= {"train.prompts_per_step": 2, "evaluate.problems": 1, "evaluate.max_new_tokens": 1}
    keys |= {"rollout.max_context": 2 * length, "rollout.max_new_tokens": length, "rollout.program": program}
    config = config_of(keys)
    counted = limits.growth_to_come(config) - 4 * limits.RESPONSE_SPANS - limits.RANK_SPANS
    counted -= 2 * (4 * 2 * length + limits.ROW_BYTES + 4)  # two tables of an evaluation
    sampled = Response(
        token_ids=(7,) * length,
        logprobs=(-0.12345,) * length,
        versions=((0, 0),),
        loss_mask=(*(True,) * (length - 10), *(not program,) * 10),
        finish_reason="length",
        text=" let" * length,
        seed=None,
        instance="a",
    )
    prompt = Prompt("efc6d158f4660c09", " let" * length, "4", ())
    groups = [
        Group(step=0, index=at, prompt=prompt, responses=(sampled,) * 2, scores=(Score(1.0),) * 2) for at in (0, 1)
    ]
    folder = RunFolder(tmp_path / "mine")
    folder.create(config, resume=False)
    folder.add_samples(0, groups, decode=lambda ids: " let" * len(ids), pieces=lambda ids: [" let"] * len(ids))
    size = folder.samples_of(0).stat().st_size
    assert (0.9 if length > 100 else 0.7) * counted < size <= counted


def test_parameters_are_counted_in_the_files(tmp_path):
    save_file({"a": numpy.zeros((3, 5), "float16"), "b": numpy.zeros(7, "float32")}, tmp_path / "model.safetensors")
    assert limits.stored_parameters(tmp_path) == 22
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(BadInput, match="damaged safetensors"):
        limits.stored_parameters(tmp_path)
