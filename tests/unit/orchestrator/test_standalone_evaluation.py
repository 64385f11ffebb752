"""Evaluation on instances that others start, with a real registry and verifier and a scripted instance that joins."""

import asyncio
import shutil

import aiohttp
import pytest

from engine.config import Config
from engine.errors import BadInput, ProcessDied
from engine.model.shape import content_hash
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.standalone_evaluation import EvaluationProgress, evaluate_model
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.progress import Progress
from engine.run.run_file import update_run
from engine.types import Score
from engine.wire.access_token import TOKEN_FILE, authorization_headers
from engine.wire.address import ADDRESS_FILE
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
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


async def joined(address, session, name, url, model, status=200):
    """The reply to an instance that was started from the folder `model`."""
    await until(lambda: address.exists() and address.read_text(), "the address")
    body = {"protocol": ROLLOUT_PROTOCOL, "name": name, "url": url, "weights": content_hash(model)}
    right = authorization_headers((address.parent / TOKEN_FILE).read_text())
    async with session.post(f"http://{address.read_text().strip()}/join", json=body, headers=right) as answer:
        assert answer.status == status
        return await answer.text()


async def test_ones_that_join_have_loaded_the_evaluated_weights_and_none_is_started(world, tiny_model, tmp_path):
    """`stale` has loaded others. `other` holds those of a training that is over: it gets its own back."""
    config, folder, meeting = world
    good = Scripted()
    other = Scripted(version=7)
    good.delay_s = other.delay_s = 0.4
    changed = shutil.copytree(tiny_model, tmp_path / "changed")
    changed.joinpath("config.json").write_text(changed.joinpath("config.json").read_text() + " ")
    address = meeting / ADDRESS_FILE
    async with good.serving() as url, other.serving() as other_url, aiohttp.ClientSession() as session:
        work = asyncio.create_task(asyncio.to_thread(evaluate_model, config, tiny_model, 3, folder, meeting))
        refused = await joined(address, session, "stale", other_url, changed, status=400)
        assert "stale does not hold the weights that are evaluated" in refused
        await joined(address, session, "guest", url, tiny_model)
        await until(lambda: good.most == PLACES, "as many responses in flight as a training step has")
        await joined(address, session, "other", other_url, tiny_model)
        [row] = await work
    assert (row["weight_version"], row["problems"], len(good.seeds) + len(other.seeds)) == (3, 6, 12)
    assert (other.version, other.updates) == (0, ["/begin_weight_update", "/update_weights"])
    assert max(good.most, other.most) == PLACES
    assert list(read_lines(folder.evaluations)) == [row]
    assert not list(folder.logs.glob("instance-*"))
    assert not address.exists()
    assert not (folder.path / ADDRESS_FILE).exists()  # where the instances of the training look


def test_none_that_joins_is_said_within_its_deadline(world, tiny_model):
    config, folder, meeting = world
    hasty = config.model_copy(update={"rollout": config.rollout.model_copy(update={"wait_s": 0.1, "timeout_s": 0.3})})
    with pytest.raises(ProcessDied, match=r"waited 0\.3 s for the first \(rollout\.timeout_s\); none has joined"):
        evaluate_model(config=hasty, model=tiny_model, weight_version=0, folder=folder, meeting=meeting)


@pytest.mark.parametrize(
    ("template", "began", "said"),
    [
        ("{{ strftime_now('%d %b') }}: {{ messages[0].content }}", 0.0, True),
        ("{{ strftime_now('%d %b') }}: {{ messages[0].content }}", 1.7e9, False),
        ("{{ messages[0].content }}", 0.0, False),
    ],
)
def test_prompts_of_the_present_time_are_said(world, tiny_model, tmp_path, template, began, said):
    config, folder, meeting = world
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    hasty = config.rollout.model_copy(update={"wait_s": 0.1, "timeout_s": 0.3})
    data = config.data.model_copy(update={"prompt_template": "chat"})
    update_run(folder.path, began=began)
    told = []
    with pytest.raises(ProcessDied, match="none has joined"):
        evaluate_model(
            config=config.model_copy(update={"rollout": hasty, "data": data}),
            model=model,
            weight_version=0,
            folder=folder,
            meeting=meeting,
            progress=EvaluationProgress(notices=RunEvents(lambda _, text: told.append(text), trained=False)),
        )
    assert any("present time" in text for text in told) == said


async def test_an_instance_of_an_evaluation_is_not_started_again_from_a_folder_that_has_changed(
    world, tiny_model, tmp_path
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    pool = Pool(world[0], model, tmp_path)
    pool.weights = content_hash(model)
    again = []
    pool.processes.restart = again.append
    await pool.restart("instance-0")
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(BadInput, match=f"{model}: the weights or the config.json changed since"):
        await pool.restart("instance-0")
    assert again == ["instance-0"]


def test_how_far_an_evaluation_is():
    progress = EvaluationProgress()
    look = progress.progress
    assert look().text == "starting 1 instance"
    progress.expected = 8
    assert look() == Progress("0 of 8 responses", 0.0)
    progress.finished = 4
    progress.count_group([Score(1.0), Score(0.0), Score(1.0), Score(0.0, excluded=True)])
    assert look() == Progress("4 of 8 responses, accuracy of these 0.667", 0.5)
    progress.finished = 8
    progress.count_group([Score(0.5), Score(0.0), Score(0.0), Score(0.0)])
    assert look() == Progress("8 responses are scored; votes and intervals", 1.0)
    progress.expected = 16
    assert look().text == "8 of 16 responses, reward of these 0.357"
