"""Replies to /v1/completions with their numbers as bytes: what an instance writes, and what the orchestrator takes."""

import json
import random

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engine.instance.replies import Result, completion_columns, completion_reply
from engine.orchestrator.pool.instance_client import BrokenReply, InstanceClient, SamplingSettings
from engine.orchestrator.pool.reply_check import Asked
from engine.types import Prompt
from engine.wire.columns import open_response
from engine.wire.rollout_messages import COLUMNS_TYPE, read_columns

RESULT = Result([8, 3, 5], [-0.5, -0.25, -1.75], "length", 7)
SAMPLING = SamplingSettings(max_new_tokens=3, temperature=1.0, top_p=1.0, top_k=0, vocabulary=50)
ASKED = Asked(3, 50, frozenset(), frozenset())


def written(result=RESULT):
    return completion_columns(4, "model", [1, 2], result)


@given(st.lists(st.tuples(st.integers(0, 49), st.floats(-9999, 0)), max_size=5))
def test_they_are_the_reply_in_json_with_its_numbers_behind_it(pairs):
    result = Result([token for token, _ in pairs], [logprob for _, logprob in pairs], "abort", 7)
    head, token_ids, logprobs = read_columns(written(result))
    whole = completion_reply(4, "model", [1, 2], result)
    found = json.loads(head)
    assert found["choices"][0]["token_ids"] == found["choices"][0]["logprobs"]["token_logprobs"] == []
    found["choices"][0]["token_ids"] = token_ids.tolist()
    found["choices"][0]["logprobs"] = {
        "token_logprobs": logprobs.tolist(),
        "tokens": [f"token_id:{token}" for token in token_ids],
    }
    assert found == whole


@pytest.mark.parametrize("cut", [1, 7, 8, 15])
def test_numbers_that_are_cut_off_are_refused(cut):
    with pytest.raises(ValueError, match=f"{3 * 16 - cut} bytes of numbers, expected 16 for each token"):
        read_columns(written()[:-cut])


@pytest.mark.parametrize("spoil", [None, "numbers", "cut", "no head"])
async def test_the_client_asks_for_them_and_takes_only_whole_ones(spoil):
    accepted = []

    async def complete(request):
        accepted.append(request.headers["Accept"])
        body = bytearray(written())
        if spoil == "numbers":
            body[-random.Random(0).randrange(1, 48)] ^= 1
        elif spoil == "no head":
            body = body[body.index(b"\n") :]
        return web.Response(body=bytes(body[:-1] if spoil == "cut" else body), content_type=COLUMNS_TYPE)

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            client = InstanceClient("instance-3", url, session, 5.0)
            asking = client.complete(Prompt("id", "", "", (1, 2)), SAMPLING, 4)
            if spoil is None:
                found = open_response(await asking)
                assert (found.token_ids, found.logprobs) == ((8, 3, 5), (-0.5, -0.25, -1.75))
                assert (found.versions, found.loss_mask) == (((0, 7),), (True,) * 3)
            else:
                with pytest.raises(BrokenReply, match="instance-3: "):
                    await asking
    finally:
        await runner.cleanup()
    assert accepted == [f"{COLUMNS_TYPE}, application/json;q=0.5"]
