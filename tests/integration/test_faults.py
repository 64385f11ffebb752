"""What makes a run off-policy is caught, rewards that misbehave, and deaths of processes; all on real runs."""

import asyncio
import json
import re
import resource
import subprocess
import sys

import msgspec
import pytest

from engine.errors import RatioGapError, RewardError, StaleRolloutError, TransferError, WeightSyncError
from engine.orchestrator.launch import launch_run as launch_here
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.steps import Steps
from engine.run.files import read_lines
from engine.trainer.checkpoint.checkpoints import is_complete, latest_checkpoint, step_of
from engine.wire.columns import RESPONSES, open_group
from support.faulty_weights import TENSOR, corrupt, skip
from support.runs import ROOT, Tree, config_of, launch, send, wait_for, write_config


@pytest.mark.slow
def test_a_skipped_publish_is_caught(settings, monkeypatch):
    skip(monkeypatch, version=1)
    with pytest.raises(StaleRolloutError, match=r"step 1.*version 0.*accepts only 1"):
        launch_here(config_of(settings | {"weights.staged": True}))
    folder = config_of(settings).folder
    assert [line["step"] for line in read_lines(folder / "steps.jsonl")] == [0]
    assert step_of(latest_checkpoint(folder / "checkpoints")) == 1  # the weights before the failed step are kept


def test_a_tensor_corrupted_in_transit_is_caught_by_its_checksum(settings, monkeypatch):
    corrupt(monkeypatch, version=1, in_transit=True)
    with pytest.raises(WeightSyncError, match=rf"instance-0.*{re.escape(TENSOR)} was corrupted in transit"):
        launch_here(config_of(settings))
    assert [line["step"] for line in read_lines(config_of(settings).folder / "steps.jsonl")] == [0]


@pytest.mark.slow
def test_a_tensor_corrupted_before_its_checksum_is_caught_by_the_probe(settings, monkeypatch):
    corrupt(monkeypatch, version=1, in_transit=False)
    with pytest.raises(
        WeightSyncError,
        match=r"instance-0: after the update to weight version 1 .* differ from the trainer's.*; or training diverges: "
        r"the update of step 0 had loss .*, grad_norm .* and learning rate 0.001",
    ):
        launch_here(config_of(settings))
    assert [line["step"] for line in read_lines(config_of(settings).folder / "steps.jsonl")] == [0]


@pytest.mark.slow
def test_a_group_whose_bytes_are_damaged_is_not_trained_and_the_run_resumes(settings, monkeypatch):
    kept = Steps.add_row

    def damage(table, row):
        if (row.step, row.index) == (1, 3):
            column = row.column(RESPONSES)
            flipped = bytearray(column.body)
            flipped[len(flipped) // 2] ^= 1
            row = row.with_columns([msgspec.structs.replace(column, body=bytes(flipped))])
        return kept(table, row)

    monkeypatch.setattr(Steps, "add_row", damage)
    config = config_of(settings)
    with pytest.raises(
        TransferError,
        match=r"step 1, group 3: the \d+ bytes of its column 'responses' differ from those that were packed",
    ):
        launch_here(config)
    assert [line["step"] for line in read_lines(config.folder / "steps.jsonl")] == [0]
    assert step_of(latest_checkpoint(config.folder / "checkpoints")) == 1  # the weights before the failed step are kept
    monkeypatch.undo()
    launch_here(config, resume=True)
    assert [line["step"] for line in read_lines(config.folder / "steps.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_no_group_of_weights_that_fail_the_probe_reaches_the_trainer(settings, monkeypatch):
    """Also when instances generate long before the trainer compares: it does so 1 s late, a step takes less."""
    put = []
    kept = Steps.add_row

    def note(table, row):
        put.append((row.step, {version for response in open_group(row).responses for _, version in response.versions}))
        return kept(table, row)

    verify = Publishes.verify

    async def late(publishes, request):
        await asyncio.sleep(1.0)
        return await verify(publishes, request)

    monkeypatch.setattr(Steps, "add_row", note)
    monkeypatch.setattr(Publishes, "verify", late)
    corrupt(monkeypatch, version=1, in_transit=False)
    sampled = []
    seen = InstanceClient._until_released

    async def reply(client, cuts):
        sampled.append(client._trusted.is_set())
        await seen(client, cuts)

    monkeypatch.setattr(InstanceClient, "_until_released", reply)
    with pytest.raises(
        WeightSyncError, match=r"instance-0: after the update to weight version 1 .* differ from the trainer's"
    ):
        launch_here(config_of(settings))
    assert {(step, *versions) for step, versions in put} == {(0, 0)}
    assert sampled.count(False) > 1  # of both versions some were there before the comparison


@pytest.mark.slow
def test_a_corrupted_tensor_is_caught_by_the_ratio_gap_where_nothing_else_looks(settings, monkeypatch):
    corrupt(monkeypatch, version=1, in_transit=False)
    with pytest.raises(RatioGapError, match=r"step 1.*disagree.*train\.ratio_gap_limit"):
        launch_here(config_of(settings | {"weights.check_tokens": 0}))


@pytest.mark.slow
def test_a_hanging_reward_scores_zero_and_is_counted(settings, tmp_path):
    hanging = {"reward.function": f"{ROOT}/tests/support/rewards.py:hangs_on_one", "reward.timeout_s": 0.5}
    code, output = launch(settings | hanging | {"train.prompts_per_step": 20, "train.steps": 2}, tmp_path)
    assert code == 0, output
    lines = list(read_lines(tmp_path / "run/steps.jsonl"))
    assert sorted(line["reward_timeouts"] for line in lines) == [0, 4]  # 40 prompts, one of which starts with 3+, G = 4
    assert all(line["reward_mean"] == pytest.approx(1 - line["reward_timeouts"] / 80) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["raises", "too_few"])
def test_a_wrong_reward_stops_the_run_after_a_checkpoint_of_its_steps_if_it_has_any(settings, tmp_path, reward):
    wrong = {"reward.function": f"{ROOT}/tests/support/rewards.py:{reward}", "train.prompts_per_step": 8}
    code, output = launch(settings | wrong | {"train.steps": 5}, tmp_path)
    assert code == 1
    assert "RewardError" in output
    assert f"rewards.py:{reward}" in output
    done = len(list(read_lines(tmp_path / "run/steps.jsonl")))
    assert (done > 0) == (reward == "raises")
    assert list(map(step_of, (tmp_path / "run/checkpoints").glob("step-*"))) == ([done] if done else [])
    assert not (tmp_path / "run/policy").exists()
    assert json.loads((tmp_path / "run/failure.json").read_text())["error"] == "RewardError"


@pytest.mark.slow
def test_a_reward_that_failed_in_the_first_step_is_mended_and_the_run_resumed(settings, tmp_path):
    """Nothing was trained with the code that has changed."""
    reward = tmp_path / "mine.py"
    reward.write_text("def reward(prompt, responses): raise ValueError\n")
    config = config_of(settings | {"reward.function": f"{reward}:reward", "train.steps": 1})
    with pytest.raises(RewardError, match="ValueError"):
        launch_here(config)
    reward.write_text("def reward(prompt, responses): return [1.0 for _ in responses]\n")
    assert launch_here(config, resume=True).policy.is_dir()


@pytest.mark.slow
def test_on_error_zero_counts_and_goes_on(settings, tmp_path):
    wrong = {
        "reward.function": f"{ROOT}/tests/support/rewards.py:raises",
        "train.prompts_per_step": 20,
        "reward.on_error": "zero",
    }
    code, output = launch(settings | wrong | {"train.steps": 2}, tmp_path)
    assert code == 0, output
    assert sum(line["reward_errors"] for line in read_lines(tmp_path / "run/steps.jsonl")) == 4


KILLS = {
    "trainer": ("engine.trainer.rank", "the trainer died"),
    "instance": ("engine.instance.embedded", "no rollout instance is left"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("orchestrator", "SIGKILL"),
        ("orchestrator", "SIGTERM"),
        ("trainer", "SIGKILL"),
        ("instance", "SIGKILL"),
        pytest.param("trainer", "SIGTERM", marks=pytest.mark.nightly),
        pytest.param("instance", "SIGTERM", marks=pytest.mark.nightly),
    ],
)
def test_killing_any_process_leaves_none_behind(settings, tmp_path, role, number):
    alone = {"rollout.restarts": 0, "rollout.wait_s": 0.5}  # else it is started again
    config = write_config(settings | alone | {"train.steps": 100_000}, tmp_path)
    log = (tmp_path / "output").open("w+")
    orchestrator = subprocess.Popen(
        [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)], stderr=log, cwd=ROOT
    )
    try:
        wait_for(lambda: (tmp_path / "run/steps.jsonl").exists(), "the first step")
        tree = Tree(orchestrator.pid)
        send(orchestrator if role == "orchestrator" else tree.named(KILLS[role][0]), number)
        code = orchestrator.wait(timeout=30)
        assert tree.left() == []
        log.seek(0)
        message = log.read()
        if role != "orchestrator":
            assert code == 1
            assert KILLS[role][1] in message
            assert ("SIGKILL" in message) == (number == "SIGKILL")
        elif number == "SIGTERM":
            assert code == 1
            assert "ended by SIGTERM" in message
    finally:
        orchestrator.kill()
        orchestrator.wait()
    if role == "instance":
        goes_on_from_its_checkpoint(settings | alone, tmp_path)


@pytest.mark.slow
def test_a_run_that_can_open_no_further_file_says_so_in_one_sentence(settings, tmp_path):
    config = write_config(settings | {"train.steps": 100_000}, tmp_path)
    command = [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)]
    orchestrator = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        wait_for(lambda: (tmp_path / "run/steps.jsonl").exists(), "the first step")
        resource.prlimit(orchestrator.pid, resource.RLIMIT_NOFILE, (10, 10))
        _, said = orchestrator.communicate(timeout=60)
    finally:
        orchestrator.kill()
        orchestrator.wait()
    assert orchestrator.returncode == 1
    told = said.strip().splitlines()[-1]
    assert re.match(
        r"error: TooManyFiles: run folder .*: Too many open files in this process, whose limit is 10;", told
    )
    assert "Traceback" not in said
    failure = json.loads((tmp_path / "run/failure.json").read_text())
    assert told == f"error: {failure['error']}: {failure['message']}"


def goes_on_from_its_checkpoint(settings, folder):
    """The run that stopped left one of its last finished step."""
    done = len(list(read_lines(folder / "run/steps.jsonl")))
    checkpoint = latest_checkpoint(folder / "run/checkpoints")
    assert is_complete(checkpoint)
    assert step_of(checkpoint) == done
    assert not (folder / "run/policy").exists()
    code, output = launch(settings | {"train.steps": done + 1}, folder, "--resume")
    assert code == 0, output
    lines = list(read_lines(folder / "run/steps.jsonl"))
    assert [line["step"] for line in lines] == list(range(done + 1))
    assert [line["versions_seen"] for line in lines] == [[step] for step in range(done + 1)]
    assert (folder / "run/policy/model.safetensors").is_file()


@pytest.mark.slow
def test_two_instances_survive_the_death_of_one(settings, tmp_path):
    config = write_config(settings | {"train.steps": 30, "rollout.instances": 2, "rollout.restarts": 0}, tmp_path)
    orchestrator = subprocess.Popen(
        [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(config)], cwd=ROOT
    )
    try:
        wait_for(lambda: (tmp_path / "run/steps.jsonl").exists(), "the first step")
        found = [p for p in Tree(orchestrator.pid).processes if "engine.instance.embedded" in " ".join(p.cmdline())]
        assert len(found) == 2
        send(found[0], "SIGKILL")
        assert orchestrator.wait(timeout=120) == 0
    finally:
        orchestrator.kill()
        orchestrator.wait()
    lines = list(read_lines(tmp_path / "run/steps.jsonl"))
    assert [line["step"] for line in lines] == list(range(30))
    assert lines[-1]["pool_size"] == 1
    assert all(line["versions_seen"] == [line["step"]] for line in lines)
