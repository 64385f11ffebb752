"""Evaluation on instances that others start, with a real registry and verifier and a scripted instance that joins."""

import asyncio

import aiohttp
import pytest

from engine.config import Config
from engine.errors import ProcessDied
from engine.orchestrator.standalone_evaluation import EvaluationProgress, evaluate_model
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.progress import Progress
from engine.wire.access_token import TOKEN_FILE, authorization_headers
from engine.wire.address import ADDRESS_FILE
from engine.wire.protocol_version import ROLLOUT_PROTOCOL
from support.scripted import Scripted, until

PLACES = 8


@pytest.fixture
def world(tmp_path, tiny_model, problems):
    """(config without instances, run folder, meeting place)"""
    config = Config.model_validate(
        {
            "run": {"name": "run", "output": str(tmp_path)},
            "model": {"path": str(tiny_model)},
            "data": {"train": str(problems), "heldout": str(problems)},
            "rollout": {
                **{"instances": 0, "max_context": 64, "max_new_tokens": 16, "timeout_s": 20, "wait_s": 20.0},
                **{"concurrency": 2, "group_size": PLACES // 2},
            },
            "evaluate": {"problems": 6, "samples": 2},
        }
    )
    folder = RunFolder(config.folder)
    meeting = tmp_path / "meeting"
    folder.create(config, resume=False)
    meeting.mkdir()
    return config, folder, meeting


async def test_one_that_joins_evaluates_and_none_is_started(world, tiny_model):
    config, folder, meeting = world
    scripted = Scripted()
    scripted.delay_s = 0.2
    address = meeting / ADDRESS_FILE
    async with scripted.serving() as url, aiohttp.ClientSession() as session:
        work = asyncio.create_task(asyncio.to_thread(evaluate_model, config, tiny_model, 3, folder, meeting))
        await until(lambda: work.done() or (address.exists() and address.read_text()), "the address")
        body = {"protocol": ROLLOUT_PROTOCOL, "name": "guest", "url": url}
        right = authorization_headers((meeting / TOKEN_FILE).read_text())
        async with session.post(f"http://{address.read_text().strip()}/join", json=body, headers=right) as answer:
            assert answer.status == 200
        [row] = await work
    assert (row["weight_version"], row["problems"], len(scripted.seeds)) == (3, 6, 12)
    assert scripted.most == PLACES  # a training step has as many responses in flight
    assert list(read_lines(folder.evaluations)) == [row]
    assert not list(folder.logs.glob("instance-*"))
    assert not address.exists()
    assert not (folder.path / ADDRESS_FILE).exists()  # where the instances of the training look


def test_none_that_joins_is_said_within_its_deadline(world, tiny_model):
    config, folder, meeting = world
    hasty = config.model_copy(update={"rollout": config.rollout.model_copy(update={"wait_s": 0.1, "timeout_s": 0.3})})
    with pytest.raises(ProcessDied, match=r"waited 0\.3 s for the first \(rollout\.timeout_s\); none has joined"):
        evaluate_model(config=hasty, model=tiny_model, weight_version=0, folder=folder, meeting=meeting)


def test_how_far_an_evaluation_is():
    progress = EvaluationProgress()
    look = progress.progress
    assert look().text == "starting 1 instance"
    progress.expected = 8
    assert look() == Progress("0 of 8 responses", 0.0)
    progress.finished = 4
    progress.count_group([1.0, 0.0, 1.0, 1.0])
    assert look() == Progress("4 of 8 responses, accuracy of these 0.750", 0.5)
    progress.finished = 8
    progress.count_group([0.5, 0.0, 0.0, 0.0])
    assert look() == Progress("8 responses are scored; votes and intervals", 1.0)
    progress.expected = 16
    assert look().text == "8 of 16 responses, mean reward of these 0.438"
