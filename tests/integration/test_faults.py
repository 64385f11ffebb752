"""What makes a run off-policy is caught, rewards that misbehave, and deaths of processes; all on real runs."""

import asyncio
import json
import re
import resource

import msgspec
import pytest

from engine.errors import RatioGapError, RewardError, StaleRolloutError, TransferError, WeightSyncError
from engine.orchestrator.launch import launch_run as launch_here
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.orchestrator.publish.publishes import Publishes
from engine.orchestrator.steps import Steps
from engine.run.checkpoint_files import is_complete, latest_checkpoint, step_of
from engine.run.files import read_lines
from engine.wire.columns import RESPONSES, open_group
from support.commands import metronome, sets
from support.faulty_weights import corrupt, skip
from support.runs import ROOT, Tree, config_of, launch, send, wait_for
from support.whole_runs import orchestrating, run, steps

REWARDS = ROOT / "tests/support/rewards.py"


WRONG_WEIGHTS = {
    "a skipped publish": (skip, {}, {"weights.staged": True}, StaleRolloutError, r"step 1.*version 0.*accepts only 1"),
    "a tensor corrupted in transit": (
        *(corrupt, {"in_transit": True}, {}, WeightSyncError),
        r"instance-0.*was corrupted in transit",
    ),
    "a tensor corrupted before its checksum": (
        *(corrupt, {"in_transit": False}, {}, WeightSyncError),
        r"instance-0: after the update to weight version 1 .* differ from the trainer's.*; or training diverges: "
        r"the update of step 0 had loss .*, grad_norm .* and learning rate 0.001",
    ),
    "a corrupted tensor where nothing else looks": (
        *(corrupt, {"in_transit": False}, {"weights.check_tokens": 0}, RatioGapError),
        r"step 1.*disagree.*train\.ratio_gap_limit",
    ),
}
"""What is done to version 1, the keys of the run, and how it ends: by version, checksum, probe and ratio gap."""


@pytest.mark.parametrize(
    "case", [case if "in transit" in case else pytest.param(case, marks=pytest.mark.slow) for case in WRONG_WEIGHTS]
)
def test_weights_that_are_not_the_steps_are_caught(settings, monkeypatch, case):
    harm, how, keys, error, said = WRONG_WEIGHTS[case]
    harm(monkeypatch, version=1, **how)
    config = config_of(settings | keys)
    with pytest.raises(error, match=said):
        launch_here(config)
    assert_stopped_after_step_0(config.folder)


@pytest.mark.slow
def test_a_rate_that_destroys_the_policy_is_named_first(tmp_path):
    """In the notices, and in the error of whatever breaks down by it; nobody is told to start another instance."""
    keys = ["train.learning_rate=1", "train.steps=12", "train.prompts_per_step=8", "run.name=far"]
    told = metronome("train", "infra/recipes/quickstart.toml", *sets(f"run.output={tmp_path}", *keys))[1]
    first = "training diverged: lower train.learning_rate (1)"
    assert re.search(rf"^warning +{re.escape(first)}; at step \d+: reward 0\.\d+ → 0", told, re.MULTILINE), told
    assert "Start one with" not in told
    if "error: " in told:
        assert f"error: {first}" in told
        assert "no checkpoint before it diverged" in told


def assert_stopped_after_step_0(folder):
    """With the weights before the failed step."""
    assert [line["step"] for line in read_lines(folder / "steps.jsonl")] == [0]
    assert step_of(latest_checkpoint(folder / "checkpoints")) == 1


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
    assert_stopped_after_step_0(config.folder)
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

    async def reply(client):
        sampled.append(client._trusted.is_set())
        await seen(client)

    monkeypatch.setattr(InstanceClient, "_until_released", reply)
    with pytest.raises(
        WeightSyncError, match=r"instance-0: after the update to weight version 1 .* differ from the trainer's"
    ):
        launch_here(config_of(settings))
    assert {(step, *versions) for step, versions in put} == {(0, 0)}
    assert sampled.count(False) > 1  # of both versions some were there before the comparison


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "keys", "figure"),
    [
        ("hangs_on_one", {"reward.timeout_s": 0.5}, "reward_timeouts"),
        ("raises", {"reward.on_error": "zero"}, "reward_errors"),
    ],
)
def test_a_reward_that_fails_for_one_prompt_of_forty_scores_zero_and_is_counted(
    settings, tmp_path, reward, keys, figure
):
    keys = keys | {"reward.function": f"{REWARDS}:{reward}", "train.prompts_per_step": 20, "train.steps": 2}
    run(settings | keys, tmp_path)
    lines = steps(tmp_path, "run")
    assert sorted(line[figure] for line in lines) == [0, 4]  # G = 4
    if reward == "hangs_on_one":  # the others have 1
        assert all(line["reward_mean"] == pytest.approx(1 - line[figure] / 80) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["raises", "too_few"])
def test_a_wrong_reward_stops_the_run_after_a_checkpoint_of_its_steps_if_it_has_any(settings, tmp_path, reward):
    wrong = {"reward.function": f"{REWARDS}:{reward}", "train.prompts_per_step": 8}
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


KILLS = {
    "trainer": ("engine.trainer.rank --", "the trainer died"),
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
    with orchestrating(settings | alone | {"train.steps": 100_000}, tmp_path) as (orchestrator, said):
        wait_for(lambda: steps(tmp_path, "run"), "the first step")
        tree = Tree(orchestrator.pid)
        send(orchestrator if role == "orchestrator" else tree.named(KILLS[role][0]), number)
        code = orchestrator.wait(timeout=30)
        assert tree.left() == []
        if role != "orchestrator":
            assert code == 1
            assert KILLS[role][1] in said()
            assert ("SIGKILL" in said()) == (number == "SIGKILL")
        elif number == "SIGTERM":
            assert code == 1
            assert "ended by SIGTERM" in said()
    if role == "instance":
        goes_on_from_its_checkpoint(settings | alone, tmp_path)


@pytest.mark.slow
def test_a_run_that_can_open_no_further_file_says_so_in_one_sentence(settings, tmp_path):
    with orchestrating(settings | {"train.steps": 100_000}, tmp_path) as (orchestrator, said):
        wait_for(lambda: steps(tmp_path, "run"), "the first step")
        resource.prlimit(orchestrator.pid, resource.RLIMIT_NOFILE, (10, 10))
        assert orchestrator.wait(60) == 1
    told = said().strip().splitlines()[-1]
    assert re.match(
        r"error: TooManyFiles: run folder .*: Too many open files in this process, whose limit is 10;", told
    )
    assert "Traceback" not in said()
    failure = json.loads((tmp_path / "run/failure.json").read_text())
    assert told == f"error: {failure['error']}: {failure['message']}"


def goes_on_from_its_checkpoint(settings, folder):
    """The run that stopped left one of its last finished step."""
    done = len(steps(folder, "run"))
    checkpoint = latest_checkpoint(folder / "run/checkpoints")
    assert is_complete(checkpoint)
    assert step_of(checkpoint) == done
    assert not (folder / "run/policy").exists()
    run(settings | {"train.steps": done + 1}, folder, "--resume")
    lines = steps(folder, "run")
    assert [line["step"] for line in lines] == list(range(done + 1))
    assert [line["versions_seen"] for line in lines] == [[step] for step in range(done + 1)]
    assert (folder / "run/policy/model.safetensors").is_file()


@pytest.mark.slow
def test_two_instances_survive_the_death_of_one(settings, tmp_path):
    two = {"train.steps": 30, "rollout.instances": 2, "rollout.restarts": 0}
    with orchestrating(settings | two, tmp_path) as (orchestrator, _):
        wait_for(lambda: steps(tmp_path, "run"), "the first step")
        found = [p for p in Tree(orchestrator.pid).processes if "engine.instance.embedded" in " ".join(p.cmdline())]
        assert len(found) == 2
        send(found[0], "SIGKILL")
        assert orchestrator.wait(timeout=120) == 0
    lines = steps(tmp_path, "run")
    assert [line["step"] for line in lines] == list(range(30))
    assert lines[-1]["pool_size"] == 1
    assert all(line["versions_seen"] == [line["step"]] for line in lines)
