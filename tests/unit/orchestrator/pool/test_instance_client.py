import asyncio
import contextlib
import errno
import gzip
import os
import resource
import time
import tracemalloc
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from engine.config import Config
from engine.errors import DeadlineError, TooManyFiles
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
from engine.wire.rollout_messages import ROLLOUT_PROTOCOL, GetHealth, GetLoad, Health
from support.scripted import Scripted, tokens_of, until

PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))
SAMPLING = SamplingSettings(max_new_tokens=16, temperature=1.0, top_p=1.0, top_k=0, vocabulary=1000)


@pytest.fixture
async def instance():
    scripted = Scripted(version=7)
    async with scripted.serving() as url, aiohttp.ClientSession() as session:
        yield scripted, InstanceClient("instance-3", url, session, 5.0)


async def test_a_response_arrives_with_its_version_and_instance(instance):
    _, client = instance
    response = await client.complete(PROMPT, SAMPLING, 4)
    assert list(open_ids(response.token_ids)) == tokens_of([1, 2, 3], 4)
    assert (response.versions, response.instance, response.seed) == (((0, 7),), "instance-3", 4)
    assert len(response.logprobs) == len(response.token_ids) == 4 * len(response.loss_mask)


async def test_every_sampling_setting_is_asked_for(instance):
    scripted, client = instance
    sampling = SamplingSettings(
        max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=30, vocabulary=1000, stop_token_ids=(60, 61)
    )
    await client.complete(PROMPT, sampling, 4)
    (body,) = scripted.asked
    wanted = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 30, "stop_token_ids": [60, 61], "seed": 4}
    assert wanted.items() <= body.items()
    assert body["prompt"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, InstanceFault),
        (503, InstanceFault),
        (302, InstanceFault),
        (204, InstanceFault),
        (400, Refused),
        (401, Refused),
        (404, Refused),
        (413, Refused),
        (409, Busy),
        (429, Busy),
    ],
)
async def test_every_status_has_its_error_which_names_instance_and_route(instance, status, kind):
    scripted, client = instance
    scripted.status = status
    with pytest.raises(kind, match=f"instance-3: POST /v1/completions answered {status}") as caught:
        await client.complete(PROMPT, SAMPLING, 0)
    assert (type(caught.value) is Refused) == (kind is Refused)  # Busy is told from what is final


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '{"choices": []}',
        '{"choices": [{"token_ids": [1]}]}',
        '{"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1]}, '
        '"finish_reason": "stop"}], "weight_versions": [[0, 1]]}',
    ],
)
async def test_what_is_no_reply_is_a_fault(instance, body):
    scripted, client = instance
    scripted.body = body or " "
    with pytest.raises(InstanceFault, match="instance-3"):
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
    scripted.delay_s = 0.2
    held, under_way = (asyncio.create_task(client.complete(PROMPT, SAMPLING, seed)) for seed in (4, 5))
    await until(lambda: scripted.running == 2, "both requests")
    client.end_calls("its weights differ")
    client.release_responses()
    for one in (held, under_way):
        with pytest.raises(InstanceGone, match="instance-3: POST /v1/completions"):
            await one
    scripted.delay_s = 0.0
    assert (await client.complete(PROMPT, SAMPLING, 4)).seed == 4


async def test_a_reply_that_is_there_when_the_instance_is_cut_does_not_count(instance):
    _, client = instance
    begun = client._cuts
    client.end_calls("its weights differ")
    client.release_responses()
    with pytest.raises(InstanceGone, match="abandoned while it waited for that comparison"):
        await client._until_released(begun)


async def test_a_reply_that_is_there_when_the_instance_is_cut_is_lost_at_once_and_holds_up_nobody(instance):
    _, client = instance
    begun = client._cuts
    client.hold_responses()
    client.end_calls("its weights differ")
    with pytest.raises(InstanceGone, match="abandoned while it waited for that comparison"):
        await asyncio.wait_for(client._until_released(begun), 1.0)


async def test_what_was_asked_after_the_cut_is_lost_when_the_instance_comes_back(instance):
    scripted, client = instance
    client.hold_responses()
    client.end_calls("its weights differ")
    held = asyncio.create_task(client.complete(PROMPT, SAMPLING, 4))  # it was given its place before the cut
    await until(lambda: scripted.seeds and not scripted.running, "the reply")
    await asyncio.sleep(0.05)
    assert not held.done()
    client.end_calls("it waits for weights")
    with pytest.raises(InstanceGone, match="abandoned: it waits for weights"):
        await held
    client.release_responses()
    assert (await client.complete(PROMPT, SAMPLING, 4)).seed == 4


async def test_weights_that_nobody_compares_are_named_after_the_deadline(instance):
    scripted, client = instance
    client._timeout_s = 0.2
    client.hold_responses()
    with pytest.raises(DeadlineError, match=r"compared with the trainer's in 0\.2 s"):
        await client.complete(PROMPT, SAMPLING, 4)


async def test_broken_and_refused_connections(instance):
    scripted, client = instance
    scripted.drop = True
    with pytest.raises(InstanceGone, match="instance-3: POST /v1/completions"):
        await client.complete(PROMPT, SAMPLING, 0)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(InstanceGone, match="instance-4: GET /load"):
            await InstanceClient("instance-4", "http://127.0.0.1:9", session, 5.0).call(GetLoad())


async def test_something_that_does_not_speak_http_is_a_fault_or_gone():
    async def rude(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(rude, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((InstanceFault, InstanceGone), match="instance-5"):
            await InstanceClient("instance-5", f"http://127.0.0.1:{port}", session, 5.0).call(GetLoad())


async def test_the_deadline_names_what_it_waited_for(instance):
    scripted, client = instance
    scripted.silent = True
    with pytest.raises(DeadlineError, match=r"instance-3: no answer to GET /load in 0\.05 s"):
        await client.call(GetLoad(), timeout_s=0.05)


@contextlib.contextmanager
def no_file_left():
    """This process can open no file within the block; the value gives some back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # what earlier tests left open is not given back
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 64, hard), hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield lambda: [os.close(taken.pop()) for _ in range(len(taken))]
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_call_waits_while_this_process_can_open_no_file(instance):
    _, client = instance
    with no_file_left() as give_back:
        calling = asyncio.create_task(client.call(GetLoad()))
        await asyncio.sleep(0.5)
        assert not calling.done()
        give_back()
        assert (await calling).weight_version == 7


async def test_no_instance_is_to_blame_if_this_process_can_open_no_file(instance):
    _, client = instance
    with no_file_left(), pytest.raises(TooManyFiles, match=r"whose limit is \d+") as refused:
        await client.call(GetLoad(), timeout_s=0.5)
    assert os.strerror(errno.EMFILE) in str(refused.value)
    assert (await client.call(GetLoad())).weight_version == 7


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


async def test_an_empty_answer_lacks_what_a_load_has(instance):
    scripted, client = instance
    scripted.body = " "
    assert await client.call(GetHealth()) == Health(ROLLOUT_PROTOCOL, 1)
    with pytest.raises(InstanceFault, match="GET /load answered 200 with an invalid reply"):
        await client.call(GetLoad())


async def test_a_reply_that_lacks_a_field_is_a_fault_which_names_it(instance):
    scripted, client = instance
    scripted.body = '{"running": 1, "waiting": 0, "generated_tokens": 5}'
    with pytest.raises(InstanceFault, match="instance-3: GET /load answered 200 .* `weight_version`"):
        await client.call(GetLoad())


async def test_a_redirect_is_not_followed():
    async def redirect(request):
        raise web.HTTPFound("http://127.0.0.1:9/elsewhere")

    app = web.Application()
    app.router.add_get("/load", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            client = InstanceClient("i", f"http://127.0.0.1:{runner.addresses[0][1]}", session, 5.0)
            with pytest.raises(InstanceFault, match="answered 302"):
                await client.call(GetLoad())
    finally:
        await runner.cleanup()


BOMB = gzip.compress(b" " * 2**26)
"""64 KiB that become 64 MiB."""


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda: web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}), "compressed"),
        (lambda: web.Response(body=b" " * 2**24), "at most 1,048,576 are expected"),
        (lambda: web.Response(body=_pieces()), "more than the 1,048,576 bytes"),
    ],
)
async def test_a_reply_that_is_compressed_or_too_large_is_not_read(reply, said):
    """One of 3 MB took 6 GB of the orchestrator's memory."""
    asked = []

    async def load(request):
        asked.append(request.headers["Accept-Encoding"])
        return reply()

    app = web.Application()
    app.router.add_get("/load", load)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    pool = Pool(Config(), Path(), Path())
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = pool.enter("i", f"http://127.0.0.1:{runner.addresses[0][1]}").client
        tracemalloc.start()
        with pytest.raises(BrokenReply, match=said):
            await client.call(GetLoad())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        await pool.close()
        await runner.cleanup()
    assert (set(asked), peak < 2**26) == ({"identity"}, True)  # the server is in this process


async def _pieces():
    while True:
        yield b" " * 2**16


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
