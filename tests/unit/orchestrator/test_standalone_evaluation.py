"""Evaluation on instances that others start, with a real registry and verifier and a scripted instance that joins."""

import asyncio

import aiohttp
import pytest

from engine.config import Config
from engine.data.tokenizer import Tokenizer
from engine.errors import ProcessDied
from engine.evaluation.benchmarks import encode_benchmarks, read_benchmarks
from engine.orchestrator.publish.probe import make_probe
from engine.orchestrator.run_events import RunEvents
from engine.orchestrator.standalone_evaluation import EvaluationProgress, compute_logprobs, evaluate_model
from engine.run.files import read_lines
from engine.run.folder import RunFolder
from engine.run.progress import Progress
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


async def joined(address, session, name, url, status=200):
    await until(lambda: address.exists() and address.read_text(), "the address")
    body = {"protocol": ROLLOUT_PROTOCOL, "name": name, "url": url}
    right = authorization_headers((address.parent / TOKEN_FILE).read_text())
    async with session.post(f"http://{address.read_text().strip()}/join", json=body, headers=right) as answer:
        assert answer.status == status
        return await answer.text()


async def test_ones_that_join_evaluate_once_they_have_proved_their_weights_and_none_is_started(world, tiny_model):
    """`stale` has other weights, `other` those of a training that is over: it gets its own back, which are right."""
    config, folder, meeting = world
    encoded = encode_benchmarks(config, read_benchmarks(config), Tokenizer(tiny_model))
    text = [token for prompt in encoded[0].prompts for token in prompt.token_ids]
    probe = make_probe(
        vocabulary=Tokenizer(tiny_model).vocabulary(),
        count=config.weights.check_tokens,
        max_context=config.rollout.max_context,
        dtype="float32",
        text=text,
    )
    right = compute_logprobs(tiny_model, "float32", probe.token_ids)
    good = Scripted()
    stale = Scripted()
    other = Scripted(version=7)
    good.probed = other.probed = right
    stale.probed = [*right[:-1], right[-1] - 0.02]
    good.delay_s = other.delay_s = 0.2
    address = meeting / ADDRESS_FILE
    told = []
    progress = EvaluationProgress(notices=RunEvents(lambda kind, text: told.append(text)))
    async with (
        stale.serving() as stale_url,
        good.serving() as url,
        other.serving() as other_url,
        aiohttp.ClientSession() as session,
    ):
        work = asyncio.create_task(asyncio.to_thread(evaluate_model, config, tiny_model, 3, folder, meeting, progress))
        await joined(address, session, "stale", stale_url)
        await until(lambda: any("stale gets no prompts" in text for text in told), "the refusal")
        assert "does not hold the weights" in await joined(address, session, "stale", stale_url, status=400)
        await joined(address, session, "guest", url)
        await until(lambda: good.most == PLACES, "as many responses in flight as a training step has")
        await joined(address, session, "other", other_url)
        [row] = await work
    assert (row["weight_version"], row["problems"], len(good.seeds) + len(other.seeds)) == (3, 6, 12)
    assert not stale.seeds
    assert f"stale does not hold the weights of {tiny_model}: its log-probabilities of 15" in "".join(told)
    assert (other.version, other.updates) == (
        0,
        ["/begin_weight_update", "/update_weights"],
    )
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
    assert look().text == "8 of 16 responses, reward of these 0.438"
