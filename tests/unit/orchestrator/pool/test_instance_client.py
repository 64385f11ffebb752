"""The client of an instance: what it asks for, what it takes for an answer, and how a call ends."""

import asyncio
import contextlib
import gzip
import time
import tracemalloc
from pathlib import Path

import aiohttp
import pytest

from engine.config import Config
from engine.errors import DeadlineError
from engine.orchestrator.pool.instance_client import (
    BrokenReply,
    Busy,
    InstanceClient,
    InstanceFault,
    InstanceGone,
    Refused,
    SamplingSettings,
    join_responses,
)
from engine.orchestrator.pool.pool import Pool
from engine.types import Prompt, Response
from engine.wire.columns import open_ids, open_response, pack_response
from engine.wire.rollout_messages import GetLoad
from support.scripted import Scripted, tokens_of, until

PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))
SAMPLING = SamplingSettings(max_new_tokens=16, temperature=1.0, top_p=1.0, top_k=0, vocabulary=1000)


@pytest.fixture
async def instance():
    scripted = Scripted(version=7)
    async with scripted.serving() as url, aiohttp.ClientSession() as session:
        yield scripted, InstanceClient("instance-3", url, session, 5.0)


async def test_every_setting_is_asked_for_and_a_response_arrives_with_its_version_and_instance(instance):
    scripted, client = instance
    sampling = SamplingSettings(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=30, vocabulary=1000, stop_token_ids=(60, 61)
    )
    response = await client.complete(PROMPT, sampling, 4)
    (body,) = scripted.asked
    wanted = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 30, "stop_token_ids": [60, 61], "seed": 4}
    assert body.items() >= {**wanted, "prompt": [1, 2, 3]}.items()
    assert list(open_ids(response.token_ids)) == tokens_of([1, 2, 3], 4)
    assert (response.versions, response.instance, response.seed) == (((0, 7),), "instance-3", 4)
    assert len(response.logprobs) == len(response.token_ids) == 4 * len(response.loss_mask)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(status, InstanceFault) for status in (500, 503, 302, 204)],
        *[(status, Refused) for status in (400, 401, 404, 413)],
        *[(status, Busy) for status in (409, 429)],
    ],
)
async def test_every_status_has_its_error_which_names_instance_and_route(instance, status, kind):
    scripted, client = instance
    scripted.status = status
    with pytest.raises(kind, match=f"instance-3: POST /v1/completions answered {status}") as caught:
        await client.complete(PROMPT, SAMPLING, 0)
    assert (type(caught.value) is Refused) == (kind is Refused)  # Busy is told from what is final


@pytest.mark.parametrize("body", [" ", "{", "[]", "null", '{"running": 1, "waiting": 0, "generated_tokens": 5}'])
async def test_what_is_no_reply_is_a_fault_which_names_what_is_missing(instance, body):
    scripted, client = instance
    scripted.body = body
    said = "weight_version" if "running" in body else ""
    with pytest.raises(InstanceFault, match=f"instance-3: GET /load answered 200 with an invalid reply.*{said}"):
        await client.call(GetLoad())
    with pytest.raises(InstanceFault, match="instance-3: POST /v1/completions answered 200"):
        await client.complete(PROMPT, SAMPLING, 0)


async def test_a_response_that_a_pause_broke_off_is_sent_again(instance):
    scripted, client = instance
    scripted.finish = "abort"
    with pytest.raises(Busy, match="cut the response short"):
        await client.complete(PROMPT, SAMPLING, 0)


async def test_what_untrusted_weights_sampled_is_held_back_until_they_are_trusted(instance):
    scripted, client = instance
    client.hold_responses()
    held = asyncio.create_task(client.complete(PROMPT, SAMPLING, 4))
    assert await client.call(GetLoad())  # what is no response is not held
    await until(lambda: scripted.seeds and not scripted.running, "the reply")
    await asyncio.sleep(0.05)
    assert not held.done()
    client.release_responses()
    assert list(open_ids((await held).token_ids)) == tokens_of([1, 2, 3], 4)


async def test_what_untrusted_weights_sampled_is_lost_when_the_instance_is_cut_also_if_it_is_trusted_later(instance):
    scripted, client = instance
    client.hold_responses()
    scripted.takes = lambda body: 0.2 * (body["seed"] == 5)
    held, under_way = (asyncio.create_task(client.complete(PROMPT, SAMPLING, seed)) for seed in (4, 5))
    await until(lambda: len(scripted.seeds) == 2 and scripted.running == 1, "both requests, and the first reply")
    client.end_calls("its weights differ")
    late = asyncio.create_task(client.complete(PROMPT, SAMPLING, 6))  # it was given its place before the cut
    for one in (held, under_way):
        with pytest.raises(InstanceGone, match="instance-3: POST /v1/completions.* was abandoned"):
            await one
    await until(lambda: len(scripted.seeds) == 3 and not scripted.running, "the third reply")
    await asyncio.sleep(0.05)
    assert not late.done()
    client.end_calls("it waits for weights")
    with pytest.raises(InstanceGone, match="abandoned: it waits for weights"):
        await late
    client.release_responses()
    assert (await client.complete(PROMPT, SAMPLING, 4)).seed == 4


async def test_the_deadline_names_what_it_waited_for():
    scripted = Scripted()
    async with scripted.serving() as url, aiohttp.ClientSession() as session:
        client = InstanceClient("instance-3", url, session, 0.2)
        client.hold_responses()
        with pytest.raises(DeadlineError, match=r"compared with the trainer's in 0\.2 s"):
            await client.complete(PROMPT, SAMPLING, 4)
        scripted.silent = True
        with pytest.raises(DeadlineError, match=r"instance-3: no answer to GET /load in 0\.05 s"):
            await client.call(GetLoad(), timeout_s=0.05)


async def test_cutting_ends_what_is_under_way_and_nothing_else(instance):
    scripted, client = instance
    scripted.delay_s = 30
    tasks = [asyncio.create_task(client.complete(PROMPT, SAMPLING, seed)) for seed in range(3)]
    await until(lambda: scripted.running == 3, "the requests")
    client.end_calls("it was silent")
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, InstanceGone)
        assert "was abandoned: it was silent" in str(result)
    await until(lambda: scripted.running == 0, "the instance to see it")
    scripted.delay_s = 0
    await client.complete(PROMPT, SAMPLING, 9)


async def test_a_call_whose_deadline_has_just_passed_may_be_cut(instance):
    """The pool learns of a death in the moment in which a heartbeat's deadline has fired
    and its task does not know yet."""
    scripted, client = instance
    scripted.silent = True
    loop = asyncio.get_running_loop()
    failed = []
    loop.set_exception_handler(lambda _, context: failed.append(context))
    calling = asyncio.create_task(client.call(GetLoad(), timeout_s=0.05))
    await asyncio.sleep(0.01)
    loop.call_later(0.1, client.end_calls, "its process ended")
    time.sleep(0.3)  # both are due when the loop looks next: first the deadline
    with pytest.raises(DeadlineError, match="no answer to GET /load"):
        await calling
    assert not failed


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BOMB = gzip.compress(b" " * 2**26)
"""64 KiB that become 64 MiB."""


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (b"", InstanceGone, "instance-5: GET /load"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", InstanceFault, "no HTTP answer"),
        (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", InstanceFault, "answered 302"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, BrokenReply, "compressed"),
        (HEAD + b"Content-Length: 16777216\r\n\r\n", BrokenReply, "at most 1,048,576 are expected"),
        (HEAD + b"\r\n" + b" " * 2**24, BrokenReply, "more than the 1,048,576 bytes"),
    ],
)
async def test_a_reply_that_no_engine_gives_is_named_and_neither_followed_nor_read_beyond_its_limit(reply, kind, said):
    """One of 3 MB took 6 GB of the orchestrator's memory."""
    asked = []

    async def serve(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).lower())
        with contextlib.suppress(ConnectionError):
            writer.write(reply)
            await writer.drain()
        writer.close()

    pool = Pool(Config(), Path(), Path())
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = pool.enter("instance-5", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").client
        tracemalloc.start()
        try:
            with pytest.raises(kind, match=said):
                await client.call(GetLoad())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await pool.close()
    assert peak < 2**26  # the server is in this process
    assert all(b"accept-encoding: identity" in one for one in asked)
    with pytest.raises(InstanceGone, match="instance-5: GET /load"):  # nobody listens any more
        async with aiohttp.ClientSession() as session:
            await InstanceClient("instance-5", client.url, session, 5.0).call(GetLoad())


def test_a_response_and_its_continuation_keep_the_version_of_each_token():
    def part(tokens, versions, finish):
        logprobs = tuple(-float(token) for token in tokens)
        whole = Response(
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            loss_mask=(True,) * len(tokens),
            finish_reason=finish,
            text="",
            seed=5,
            instance=f"after {versions[0][1]}",
        )
        return pack_response(whole)

    first = join_responses(None, part((1, 2), ((0, 3),), "abort"))
    same = join_responses(first, part((3,), ((0, 3),), "abort"))
    newer = join_responses(same, part((4, 5), ((0, 4),), "abort"))
    last = join_responses(newer, part((6, 7), ((0, 4), (1, 5)), "stop"))  # as vLLM says it where it can't tell
    whole = open_response(last)
    assert whole.token_ids == (1, 2, 3, 4, 5, 6, 7)
    assert whole.logprobs == tuple(-float(token) for token in whole.token_ids)
    assert [step.versions for step in (same, newer, last)] == [((0, 3),), ((0, 3), (3, 4)), ((0, 3), (3, 4), (6, 5))]
    assert (whole.finish_reason, len(whole.loss_mask), whole.instance) == ("stop", 7, "after 4")
