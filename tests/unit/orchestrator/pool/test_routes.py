"""The experts of each token on their way: an instance that returns them over HTTP, the check of its reply, the joining
of a response that was cut, the column of the group, and what the trainer reads."""

import dataclasses

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from engine.model.shape import Experts
from engine.orchestrator.pool.instance_client import BrokenReply, InstanceClient, SamplingSettings
from engine.trainer.ranks.packing import Packing
from engine.types import Prompt
from engine.wire.columns import open_group
from engine.wire.routes import open_routes, pack_routes
from support.pool_world import PROMPTS, worlds
from support.scripted import Scripted, tokens_of

EXPERTS = Experts(count=6, per_token=2, intermediate=8, normalised=True, layers=(1, 2, 4))
SAMPLING = SamplingSettings(
    max_new_tokens=16, temperature=1.0, top_p=1.0, top_k=0, vocabulary=1000, partial=True, experts=EXPERTS
)
PROMPT = Prompt("id", "1+1=", "2", (1, 2, 3))


def route(tokens, version):
    """[tokens, 3, 2] experts that depend on token, layer and version."""
    first = np.array(tokens)[:, None] + np.arange(3) + version
    return np.stack([first % 6, (first + 1) % 6], axis=-1).astype(np.uint8)


@pytest.fixture
def world(tmp_path, monkeypatch):
    return worlds(tmp_path, monkeypatch)


@pytest.fixture
async def instance():
    scripted = Scripted(version=7)
    scripted.route = route
    async with scripted.serving() as url, aiohttp.ClientSession() as session:
        yield scripted, InstanceClient("instance-3", url, session, 5.0)


async def test_a_group_gets_the_column_of_the_routes_that_its_instance_returned(world):
    async with world() as w:
        w.produce(sampling={"experts": EXPERTS})
        scripted, _ = await w.join("a")
        scripted.route = route
        await w.run()
        w.check_complete()
    for group in w.groups:
        routes = open_routes(group.columns["routes"])
        lengths = [len(response.token_ids) for response in group.responses]
        prompt, *own = np.split(routes, np.cumsum([len(group.prompt.token_ids), *lengths])[:-1])
        assert (prompt == route(list(group.prompt.token_ids), 0)).all()
        for found, response in zip(own, group.responses, strict=True):
            assert (found[:-1] == route(list(response.token_ids), 0)[:-1]).all()
            assert (found[-1] == -1).all()  # no layer has computed it
    for shared, rows in ((True, 1), (False, 4)):
        (row,) = Packing(budget=4096, shared_prompt=shared).rows(w.groups[:1])
        expected = torch.from_numpy(route(row.layout.token_ids.tolist(), 0)).to(torch.int16)
        found = row.layout.routes
        assert int((found[:, 0, 0] < 0).sum()) == 4
        assert torch.equal(found, expected.where(found >= 0, -1))
        assert len(row.layout.segments) == rows
    assert len(w.groups) == len(PROMPTS)


async def test_a_continued_response_keeps_the_routes_that_each_token_was_sampled_with(instance):
    scripted, client = instance
    seed = next(seed for seed in range(20) if len(tokens_of([1, 2, 3], seed)) == 4)
    scripted.cuts = 1
    begun = await client.complete(PROMPT, SAMPLING, seed)
    assert begun.length == 1
    scripted.version = 8
    whole = await client.complete(PROMPT, SAMPLING, seed, begun)
    tokens = [1, 2, 3, *tokens_of([1, 2, 3], seed)][:-1]
    expected = np.concatenate([route(tokens, 7)[:3], route(tokens, 8)[3:]])
    assert whole.routes == expected.tobytes()


def with_expert(value):
    def change(routes):
        routes[1, 2, 0] = routes[1, 2, 1] if value is None else value
        return routes

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "no routes, although they were requested"),
        (lambda routes: routes[1:], r"routes uint8 \[\d, 3, 2\], expected uint8 \[\d, 3, 2\]"),
        (lambda routes: np.concatenate([routes, routes], axis=1), r"routes uint8 \[\d, 6, 2\]"),
        (lambda routes: routes.astype(np.uint16), "routes uint16"),
        (with_expert(6), "routes to expert 6, but the model has 6 in a layer"),
        (with_expert(255), "routes to expert 255"),
        (with_expert(None), "routes that send a token to one expert twice"),
    ],
)
async def test_wrong_routes_break_the_protocol_by_name(instance, change, said):
    scripted, client = instance
    scripted.route = change and (lambda tokens, version: change(route(tokens, version).copy()))
    with pytest.raises(BrokenReply, match=f"instance-3: .*breaks the protocol: {said}"):
        await client.complete(PROMPT, SAMPLING, 4)


async def test_routes_are_only_asked_for_where_they_are_replayed(instance):
    scripted, client = instance
    response = await client.complete(PROMPT, dataclasses.replace(SAMPLING, experts=None), 4)
    assert response.routes == b""
    assert "routes" not in scripted.asked[0]


async def test_a_response_without_a_token_has_no_routes(instance):
    _, client = instance
    whole = await client.complete(PROMPT, SAMPLING, 4)
    empty = msgspec.structs.replace(whole, token_ids=b"", routes=b"")
    values = open_group_values(pack_routes(3, [empty, whole], EXPERTS))
    assert values.shape == (3 + whole.length, 3, 2)
    assert (values[:-1] == np.frombuffer(whole.routes, np.uint8).reshape(-1, 3, 2)).all()
    assert (open_routes(open_group_values(pack_routes(3, [empty], EXPERTS))) == -1).all()


def open_group_values(column):
    from engine.wire.columns import Row

    return open_group(Row(step=0, index=0, tokens=0, lengths=(), trained=(), columns=(column,))).columns["routes"]


def test_a_layer_of_many_experts_has_two_bytes_for_each():
    many = dataclasses.replace(EXPERTS, count=512)
    column = pack_routes(2, [], many)
    assert open_group_values(column).dtype == np.uint16
    assert (open_routes(open_group_values(column)) == -1).all()
