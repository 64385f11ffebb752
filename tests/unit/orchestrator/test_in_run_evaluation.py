"""Evaluation at a drain, over real sockets with a scripted instance:
when weights may move, what is cut, what is refused."""

import asyncio
import contextlib
import json
import re
from types import SimpleNamespace

import pytest

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.errors import TakenOver
from engine.orchestrator import in_run_evaluation
from engine.orchestrator.in_run_evaluation import InRunEvaluation
from engine.orchestrator.pool.health import HealthMonitor
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.rollout_service import RolloutService
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from support.run_folders import newer_attempt
from support.scripted import Scripted, until


@pytest.fixture
def world(tmp_path, tiny_model, problems):
    """An instance that serves a version, and the evaluation of a run of ten steps on it: 6 problems, 2 samples."""

    @contextlib.asynccontextmanager
    async def begin(version=0, delay_s=0.0, rollout=(), train=(), reward=(), **evaluate):
        config = Config.model_validate(
            {
                "run": {"name": "run", "output": str(tmp_path)},
                "model": {"path": str(tiny_model)},
                "train": {"steps": 10, **dict(train)},
                "data": {"train": str(problems), "heldout": str(problems)},
                "rollout": {"max_context": 64, "max_new_tokens": 16, "timeout_s": 10, **dict(rollout)},
                "reward": dict(reward),
                "evaluate": {"every": 2, "problems": 6, "samples": 2, "max_wait_s": 20, **evaluate},
            }
        )
        folder = RunFolder(config.folder)
        folder.create(config, resume=False)
        scripted = Scripted(version)
        notified = asyncio.Event()
        scripted.delay_s = delay_s

        async def notify():
            notified.set()

        async with scripted.serving() as url:
            pool = Pool(config, tiny_model, folder.path)
            async with HealthMonitor(pool):
                await pool.connect_instances()
                pool.enter("one", url)
                evaluation = InRunEvaluation(
                    config, folder, RolloutService(pool, None, Tokenizer(tiny_model), None, None), notify
                )
                evaluation.begin_run(0)
                try:
                    yield evaluation, folder, scripted, notified
                    evaluation.check_evaluations()
                finally:
                    await evaluation.close()
                    await pool.close()

    return begin


def rows(folder):
    return list(read_lines(folder.evaluations))


async def test_weights_wait_until_the_last_response_is_in_and_not_for_its_scores(world):
    async with world(version=4, delay_s=0.3) as (evaluation, folder, scripted, notified):
        assert evaluation.allows_publish(True)
        evaluation.evaluate_version(4)
        assert not evaluation.allows_publish(True)
        await until(lambda: evaluation.allows_publish(True), "the responses")
        assert len(scripted.seeds) == 12
        assert notified.is_set()
        await evaluation.finish_evaluations()
        (row,) = rows(folder)
        assert (row["weight_version"], row["in_run"], row["problems"], row["samples"]) == (4, True, 6, 2)
        assert 0.3 <= row["exposed_s"] <= row["seconds"]


async def test_only_due_steps_and_each_once(world):
    told = []
    async with world() as (evaluation, folder, scripted, _):
        folder.events = SimpleNamespace(send=lambda *event: told.append(event))
        evaluation.evaluate_version(0)
        await evaluation.finish_evaluations()
        evaluation.evaluate_version(0)  # the step is redone
        await evaluation.finish_evaluations()
        for step in (1, 9):  # not due; the last
            evaluation.evaluate_version(step)
            assert evaluation.allows_publish(True)
        assert len(scripted.seeds) == 12
        assert [row["weight_version"] for row in rows(folder)] == [0]
    ((kind, (stage, text)),) = told  # the console prints it
    assert (kind, stage) == ("notice", "evaluate")
    said = r"version 0: accuracy avg@2 0\.\d{3} \[0\.\d{3}, [01]\.\d{3}\] on 6 problems of .*; took .* training waited"
    assert re.match(said, text)


async def running(evaluation, scripted):
    await until(lambda: scripted.running, "requests")


async def late(evaluation, scripted):
    await running(evaluation, scripted)
    assert not evaluation.allows_publish(True)
    began = asyncio.get_running_loop().time()
    await until(lambda: evaluation.allows_publish(True), "the cut")
    assert 0.1 < asyncio.get_running_loop().time() - began < 5
    await until(lambda: not scripted.running, "the end of its requests")


async def at_once(evaluation, scripted):
    assert not evaluation.allows_publish(True)
    await until(lambda: evaluation.allows_publish(True), "the cut")
    assert scripted.seeds == []


async def abandoned(evaluation, scripted):
    await running(evaluation, scripted)
    assert evaluation.allows_publish(False)  # no instance holds its weights any more
    await until(lambda: not scripted.running, "the end of its requests")


async def unscored(evaluation, scripted):
    await until(lambda: len(scripted.seeds) == 12 and not scripted.running, "the responses")
    began = asyncio.get_running_loop().time()
    await evaluation.finish_evaluations()  # not for the 60 s of the reward: the trainer would give up
    assert 1.9 < asyncio.get_running_loop().time() - began < 9


async def other_weights(evaluation, scripted):
    scripted.version = 3
    await evaluation.finish_evaluations()


SLOW = {"reward": {"function": "SLOW", "timeout_s": 60}, "train": {"timeout_s": 4}}


@pytest.mark.parametrize(
    ("act", "how", "reason"),
    [
        (late, {"delay_s": 60, "max_wait_s": 0.2}, "^0 of 12 responses had arrived when training had waited 0.2 s for"),
        (at_once, {"max_wait_s": 0}, "^its problems were not yet encoded, or its verifiers not yet started, when"),
        (
            unscored,
            SLOW,
            "^not all of its responses were scored .* when the last step had waited 2 s for it",
        ),
        (running, {"delay_s": 60}, "^0 of 12 responses had arrived when the run ended$"),
        (abandoned, {"delay_s": 60}, "had arrived when the last instance that held its weights was gone$"),
        (other_weights, {}, "^StaleRolloutError: evaluation of weight version 0, .* of one: sampled from version 3$"),
    ],
)
async def test_one_that_is_not_whole_is_dropped_with_its_reason(world, tmp_path, capsys, act, how, reason):
    (tmp_path / "slow.py").write_text("import time\ndef reward(prompt, responses): time.sleep(60)\n")
    if "reward" in how:
        how = how | {"reward": how["reward"] | {"function": f"{tmp_path / 'slow.py'}:reward"}}
    async with world(**how) as (evaluation, folder, scripted, _):
        evaluation.evaluate_version(0)
        await act(evaluation, scripted)
    (lost,) = read_lines(in_run_evaluation.dropped_file(folder))
    assert re.search(reason, lost["reason"])
    assert f"evaluate: version 0 dropped: {lost['reason']}" in capsys.readouterr().out
    assert lost["exposed_s"] >= (0.2 if act is late else 0.0)
    assert rows(folder) == []


async def test_an_evaluation_that_cannot_be_written_ends_without_ending_the_training(world, capsys):
    async with world() as (evaluation, folder, _, _):
        (folder.path / "evaluations").write_text("no folder")
        evaluation.evaluate_version(0)
        await evaluation.finish_evaluations()
        evaluation.check_evaluations()
        said = capsys.readouterr().out
        assert "evaluate: version 0 dropped: FileExistsError: " in said
        assert "dropped.jsonl can't be written: " in said
        assert rows(folder) == []


async def test_deadlines_of_an_evaluation_are_not_held_against_the_instance(world):
    async with world(delay_s=60, rollout={"timeout_s": 0.2}) as (evaluation, _, scripted, _):
        evaluation.evaluate_version(0)
        await until(lambda: len(scripted.seeds) > 24, "requests that are sent again")
        (instance,) = evaluation._service.pool.instances
        assert (instance.state, instance.failures) == ("serving", 0)


async def test_a_orchestrator_that_was_taken_over_adds_no_evaluation_and_no_drop(world):
    async with world() as (evaluation, folder, _, _):
        folder.fence = newer_attempt(folder.path)
        evaluation.evaluate_version(0)
        newer_attempt(folder.path)
        await evaluation.finish_evaluations()
        with pytest.raises(TakenOver):
            evaluation.check_evaluations()
        assert rows(folder) == []
    assert not in_run_evaluation.dropped_file(folder).exists()


def test_a_run_that_goes_back_forgets_what_it_evaluated_later(tmp_path):
    folder = RunFolder(tmp_path)
    inside = [{"weight_version": version, "in_run": True} for version in (2, 4)]
    made = [{"weight_version": 0}, *inside, {"weight_version": 9}]
    folder.evaluations.write_text("".join(json.dumps(row) + "\n" for row in made))
    in_run_evaluation.cut_evaluations(folder, 2)
    assert [row["weight_version"] for row in rows(folder)] == [0, 2, 9]
