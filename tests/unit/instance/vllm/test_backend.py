"""vLLM's backend behind the routes, over an engine that only plays vLLM's: what pauses, updates and faults do."""

import asyncio
import base64
import json
import sys
import types

import httpx
import numpy as np
import pytest

from engine.instance.http import InstanceApp
from engine.instance.refusals import Conflict, Refusal
from engine.instance.vllm.backend import VllmBackend
from support.tiny_models import save

PROMPT = [5, 9, 2]
TOKEN = "a-secret"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
CLIENT = {"base_url": "http://127.0.0.1", "headers": RIGHT}
ASKED = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


class Engine:
    """Answers when it is let; the weights of its two workers are a version and whether they are whole."""

    def __init__(self, folder):
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
        model = types.SimpleNamespace(model=str(folder), max_model_len=20, get_vocab_size=lambda: 50)
        self.vllm_config = types.SimpleNamespace(
            model_config=model,
            parallel_config=types.SimpleNamespace(world_size_across_dp=1),
            scheduler_config=types.SimpleNamespace(max_num_seqs=1),
            profiler_config=types.SimpleNamespace(profiler=None),
        )
        self.running = {}
        self.asked = []
        self.logprob = -0.5
        self.workers = [{"weight_version": 0, "damaged": False, "updating": False} for _ in range(2)]
        self.refuses = None
        self.refusing = (0, 1)
        self.calls = []
        self.hangs = None
        self.dies = False
        self.routed = None

    async def generate(self, prompt, params, request_id):
        if self.dies:
            raise RuntimeError("EngineCore is gone")
        self.asked.append((prompt, params.given))
        ended = self.running[request_id] = asyncio.get_running_loop().create_future()
        try:
            reason = await ended
        finally:
            del self.running[request_id]
        tokens = [7, 8] if reason == "length" else [7]
        scored = [{token: types.SimpleNamespace(logprob=self.logprob)} for token in tokens]
        sampled = types.SimpleNamespace(
            token_ids=tokens, logprobs=scored, finish_reason=reason, routed_experts=self.routed
        )
        prompt_logprobs = [None, *({token: types.SimpleNamespace(logprob=-1.5)} for token in PROMPT[1:])]
        yield types.SimpleNamespace(
            finished=True,
            outputs=[sampled],
            prompt_token_ids=PROMPT,
            prompt_logprobs=prompt_logprobs if "prompt_logprobs" in params.given else None,
            num_cached_tokens=0,
        )

    def end(self, reason="length"):
        for ended in self.running.values():
            ended.set_result(reason)

    async def pause_generation(self, mode):
        if mode == "abort":
            self.end("abort")

    async def resume_generation(self):
        pass

    async def reset_prefix_cache(self):
        return True

    async def check_health(self):
        if self.dies:
            raise RuntimeError("EngineCore is gone")

    async def collective_rpc(self, method, args):
        action, argument = args
        self.calls.append(action)
        answers = [self.answer(number, action, argument) for number in range(len(self.workers))]
        if action == self.hangs:
            await asyncio.get_running_loop().create_future()
        return answers

    def answer(self, number, action, argument):
        if action == self.refuses and number in self.refusing:
            return {"error": "model.norm was corrupted in transit", "kind": "BadRequestError", "status": 400}
        if action == "finish":
            self.workers[number] |= {"weight_version": argument, "damaged": False}
        return {"result": {"state": dict(self.workers[number]), "poll": True}.get(action)}


class Params:
    def __init__(self, **given):
        self.given = given


@pytest.fixture
def engine(tmp_path, monkeypatch):
    vllm = types.ModuleType("vllm")
    vllm.SamplingParams = Params
    settings = types.ModuleType("vllm.sampling_params")
    settings.RequestOutputKind = types.SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", settings)
    monkeypatch.setenv("METRONOME_TOKEN", TOKEN)
    return Engine(tmp_path)


@pytest.fixture
async def client(engine):
    app = InstanceApp(VllmBackend(engine), open_requests=8, read_s=5.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), **CLIENT) as made:
        yield made


async def post(client, route, status=200, **body):
    reply = await client.post(route, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def begin(client, **more):
    return asyncio.create_task(post(client, "/v1/completions", **ASKED | more))


async def runs(engine, count):
    async with asyncio.timeout(5):
        while len(engine.running) != count:
            await asyncio.sleep(0)


async def until(client, **expected):
    async with asyncio.timeout(5):
        while not expected.items() <= (await client.get("/load")).json().items():
            await asyncio.sleep(0)


async def test_vllm_gets_the_checked_request_and_its_output_becomes_our_reply(client, engine, tmp_path):
    task = begin(client, seed=3, prompt_logprobs=0, stop_token_ids=[9])
    await runs(engine, 1)
    engine.end()
    reply = await task
    ((prompt, given),) = engine.asked
    assert prompt["prompt_token_ids"] == PROMPT
    wanted = {"max_tokens": 2, "temperature": 1.0, "seed": 3, "stop_token_ids": [9], "ignore_eos": True}
    assert wanted.items() <= given.items()
    [choice] = reply["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8], "length")
    assert choice["logprobs"] == {"token_logprobs": [-0.5, -0.5], "tokens": ["token_id:7", "token_id:8"]}
    assert choice["prompt_logprobs"] == [None, {"9": {"logprob": -1.5}}, {"2": {"logprob": -1.5}}]
    assert (reply["model"], reply["weight_versions"]) == (str(tmp_path), [[0, 0]])
    await until(client, generated_tokens=2, prefills=1, running=0)


@pytest.mark.parametrize("found", [np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) % 4, None])
async def test_the_experts_of_each_token_are_those_of_the_layers_that_have_some(engine, tmp_path, found):
    """Of prompt and response but the last token."""
    save(tmp_path, "qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3)
    app = InstanceApp(VllmBackend(engine, routes=True), open_requests=8, read_s=5.0)
    engine.routed = found
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), **CLIENT) as client:
        task = asyncio.create_task(post(client, "/v1/completions", 500 if found is None else 200, **ASKED, routes=True))
        await runs(engine, 1)
        engine.end()
        answer = await task
    if found is None:
        assert "vLLM returned no experts" in answer["error"]["message"]
    else:
        routes = answer["choices"][0]["routes"]
        assert (routes["dtype"], routes["shape"]) == ("uint8", [4, 2, 2])
        assert base64.b64decode(routes["data"]) == found[:, 1:].tobytes()


async def test_an_instance_without_routes_refuses_to_be_asked_for_them(client):
    answer = await post(client, "/v1/completions", 400, **ASKED, routes=True)
    assert "algorithm.routing_replay" in answer["error"]["message"]
    answer = await post(client, "/v1/completions", 400, **ASKED, routes=1)
    assert "routes = 1; it must be true or false" in answer["error"]["message"]


async def updated(client, version, status=200):
    await post(client, "/begin_weight_update")
    await post(client, "/update_weights", update_info={"transport": "base"})
    await post(client, "/finish_weight_update", status=status, weight_version=version)


async def completed(client, engine):
    task = begin(client)
    await runs(engine, 1)
    engine.end()
    return await task


async def test_no_update_begins_under_a_response(client, engine):
    task = begin(client)
    await runs(engine, 1)
    waiting = asyncio.create_task(post(client, "/begin_weight_update?mode=wait", status=409))
    newer = asyncio.create_task(post(client, "/begin_weight_update?mode=wait"))
    await until(client, running=1)
    await post(client, "/update_weights", status=409, update_info={"transport": "base"})
    assert "start" not in engine.calls
    engine.end()
    assert (await task)["weight_versions"] == [[0, 0]]
    assert "a newer weight update has begun" in (await waiting)["error"]["message"]
    await newer
    assert engine.calls.count("start") == 1


async def test_workers_of_two_versions_answer_nothing_until_a_whole_update(client, engine):
    """A refused end of an update: the first worker has ended it, and the second has loaded nothing."""
    engine.refuses = "finish"
    engine.refusing = (1,)
    await updated(client, 4, status=400)
    await post(client, "/resume", status=409)
    assert "half-way" in (await post(client, "/v1/completions", status=409, **ASKED))["error"]["message"]
    engine.refuses = None
    await updated(client, 5)
    assert (await completed(client, engine))["weight_versions"] == [[0, 5]]


@pytest.mark.parametrize("action", ["finish", "state"])
async def test_the_version_is_right_after_an_end_of_an_update_that_nobody_waited_for(engine, action):
    """The workers have ended the update, but the call is cut off before they have said so."""
    backend = VllmBackend(engine)
    await backend.pause(abort=False)
    await backend.start_update()
    engine.hangs = action
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await backend.finish_update(4)
    engine.hangs = None
    with pytest.raises(Conflict, match="unfinished"):
        await backend.resume()
    engine.refuses = "finish"  # as the workers do: their update has ended
    with pytest.raises(Refusal):
        await backend.finish_update(4)
    await backend.resume()
    assert (await backend.load())["weight_version"] == 4


async def test_the_probe_is_computed_by_the_new_weights_before_anything_that_waits(client, engine):
    await post(client, "/begin_weight_update")
    held = begin(client)
    await until(client, waiting=1)
    await post(client, "/update_weights", update_info={"transport": "base"})
    finish = asyncio.create_task(post(client, "/finish_weight_update", weight_version=4, probe=PROMPT))
    await runs(engine, 1)
    await until(client, waiting=1)
    engine.end()
    assert await finish == {"weight_version": 4, "logprobs": [-1.5, -1.5]}
    await runs(engine, 1)
    engine.end()
    assert (await held)["weight_versions"] == [[0, 4]]


async def test_an_abort_that_is_cut_off_leaves_weights_that_nobody_trusts(engine):
    backend = VllmBackend(engine)
    await backend.pause(abort=False)
    await backend.start_update()
    engine.refuses = "finish"
    engine.hangs = "abort"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await backend.finish_update(4)
    with pytest.raises(Conflict, match="unfinished"):
        await backend.resume()
    with pytest.raises(Conflict, match="half-way"):
        backend.check_whole()


async def test_a_pause_holds_back_and_an_abort_also_ends_what_is_held(client, engine):
    await post(client, "/pause?mode=wait")
    early = begin(client)
    await until(client, waiting=1)
    await post(client, "/resume")
    await until(client, running=1)
    late = begin(client)
    await runs(engine, 2)
    await until(client, running=1, waiting=1)  # one slot
    draining = asyncio.create_task(post(client, "/pause?mode=wait"))
    held = begin(client)
    await until(client, waiting=2)
    error = await post(client, "/resume", status=409)
    assert "still draining" in error["error"]["message"]
    await post(client, "/pause?mode=abort")
    assert await draining == {"status": "paused"}
    choices = [(await task)["choices"][0] for task in (early, late, held)]
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 3
    assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 0]
    await post(client, "/resume")


async def test_a_mixture_of_weights_answers_nothing_until_a_whole_update(client, engine):
    await post(client, "/update_weights", status=409, update_info={"transport": "base"})
    await post(client, "/begin_weight_update")
    held = begin(client)
    await until(client, waiting=1)
    engine.refuses = "begin"
    engine.workers[1]["damaged"] = True
    error = await post(client, "/update_weights", status=400, update_info={"transport": "base"})
    assert "model.norm" in error["error"]["message"]
    assert (await held)["choices"][0]["finish_reason"] == "abort"
    await post(client, "/resume", status=409)
    error = await post(client, "/v1/completions", status=409, **ASKED)
    assert "half-way" in error["error"]["message"]
    engine.refuses = None
    await updated(client, 3)
    await until(client, weight_version=3)


@pytest.mark.parametrize("how", ["nan", "dies"])
async def test_faults_of_the_engine_are_500_in_our_form(client, engine, how):
    engine.dies = how == "dies"
    engine.logprob = float("nan")
    task = asyncio.create_task(post(client, "/v1/completions", status=500, **ASKED))
    if how == "nan":
        await runs(engine, 1)
        engine.end()
    error = (await task)["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert ("not finite" if how == "nan" else "EngineCore is gone") in error["message"]
    assert (await client.get("/health")).status_code == (500 if how == "dies" else 200)
