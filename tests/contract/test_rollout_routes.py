"""The HTTP routes of a rollout instance, against one real server process of each engine."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from contextlib import ExitStack, suppress

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.orchestrator.pool.reply_check import Asked, check_reply
from engine.tools.conformance.suite import RULES
from engine.wire.columns import open_ids
from engine.wire.rollout_messages import COLUMNS_TYPE, CompletionReply
from support.broken_engine import tried
from support.runs import wait_for
from support.served import (
    DEADLINE_S,
    ENGINES,
    PROMPT,
    RIGHT,
    TOKEN,
    VOCABULARY,
    command,
    logprobs_of,
    save_model,
    serving,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder, 0)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def address(engine, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(models[0], folder, "--name", "under-test", engine=engine) as (process, ready):
        assert ready["pid"] == process.pid
        yield f"http://{ready['host']}:{ready['port']}"


@pytest.fixture
async def http(address):
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(DEADLINE_S), headers=RIGHT) as session:
        yield session
        # whatever a failing test left behind
        async with session.post("/pause?mode=abort"), session.post("/resume"):
            pass


async def get(http, path):
    async with http.get(path) as reply:
        return reply.status, await reply.json()


async def post(http, path, body=None):
    async with http.post(path, json={} if body is None else body) as reply:
        return reply.status, await reply.json()


async def complete(http, **body):
    """A reply, which keeps the rules by which the orchestrator checks it."""
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True} | body
    status, reply = await post(http, "/v1/completions", body)
    assert status == 200, reply
    every = frozenset(range(VOCABULARY))
    asked = Asked(body["max_tokens"], VOCABULARY, frozenset(body.get("stop_token_ids", ())), every)
    check_reply(msgspec.convert(reply, CompletionReply), asked, 0, "instance")
    return reply


def test_metronome_conform_finds_every_rule_kept_and_leaves_it_as_it_was(address, monkeypatch):
    monkeypatch.setenv("METRONOME_TOKEN", TOKEN)
    required = sum(rule.required for rule in RULES)
    for _ in range(2):
        holds, lines, last = tried(address)
        assert holds
        assert lines.keys() == {rule.name for rule in RULES}
        assert all(line.split()[1] == "pass" for line in lines.values())
        assert f"{required} required rules hold, and {len(RULES) - required} others" in last


async def test_an_instance_without_text_says_how_to_get_it(http):
    """With text: test_text_routes.py."""
    status, reply = await post(http, "/v1/completions", {"prompt": "12+34="})
    assert status == 400
    assert "metronome serve --model" in reply["error"]["message"]
    assert "metronome serve --model" in (await get(http, "/"))[1]["text"]
    assert (await post(http, "/v1/chat/completions", {"messages": []}))[0] == 404


async def test_an_instance_that_has_no_folder_for_profiles_records_none(http):
    status, reply = await post(http, "/start_profile")
    assert status == 400
    assert "--profile" in reply["error"]["message"]
    assert (await post(http, "/stop_profile"))[0] == 409


async def test_metrics_are_prometheus_text_and_count(http, engine):
    async def scrape():
        async with http.get("/metrics") as reply:
            assert (reply.status, reply.headers["Content-Type"].split(";")[0]) == (200, "text/plain")
            families = list(text_string_to_metric_families(await reply.text()))
        own = [family for family in families if family.name.startswith("metronome_instance_")]
        assert all(family.documentation and family.type in ("gauge", "counter") for family in own)
        assert engine == "vllm" or own == families
        assert engine == "embedded" or "vllm:generation_tokens" in {family.name for family in families}
        return {sample.name: sample.value for family in own for sample in family.samples}

    before = await scrape()
    await complete(http, prompt=[8, 8, 3], max_tokens=9)
    after = await scrape()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"metronome_instance_generated_tokens_total": 9, "metronome_instance_prefills_total": 1}
    load = (await get(http, "/load"))[1]
    for name in ("running", "waiting", "weight_version"):
        assert after[f"metronome_instance_{name}"] == load[name]
    assert after["metronome_instance_generated_tokens_total"] == load["generated_tokens"]
    assert "metronome_instance_weight_updates_total" in after


async def test_a_completion_has_vllms_shape_and_our_version(http, models):
    reply = await complete(
        http, temperature=0.7, top_p=1.0, top_k=0, seed=3, n=1, logprobs=0, return_token_ids=True, stop_token_ids=[]
    )
    assert reply["object"] == "text_completion"
    assert reply["model"] == models[0]
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert (reply["weight_version"], reply["weight_versions"]) == (0, [[0, 0]])
    [choice] = reply["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "", "length")
    tokens = choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs_of(models[0], tokens, 0.7), abs=1e-4)


async def test_a_completion_has_its_numbers_as_bytes_for_a_client_that_accepts_them(http):
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "seed": 3}
    plain = await complete(http, **body)
    async with http.post("/v1/completions", json=body, headers={"Accept": COLUMNS_TYPE}) as reply:
        assert (reply.status, reply.content_type) == (200, COLUMNS_TYPE)
        found = CompletionReply.of_columns(await reply.read())
    asked = Asked(8, VOCABULARY, frozenset(), frozenset(range(VOCABULARY)))
    assert open_ids(check_reply(found, asked, 0, "instance").token_ids) == plain["choices"][0]["token_ids"]
    async with http.post("/v1/completions", json=body | {"prompt": []}, headers={"Accept": COLUMNS_TYPE}) as reply:
        assert (reply.status, (await reply.json())["error"]["type"]) == (400, "BadRequestError")


def running(address):
    request = urllib.request.Request("http://{}:{}/load".format(*address), headers=RIGHT)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return json.load(reply)["running"]


def test_sigterm_ends_it_with_exit_code_0_also_under_load(models, tmp_path):
    """It waits for no response: there is work for many seconds, and no reply to the last request."""
    core = str(min(os.sched_getaffinity(0)))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: %b\r\nContent-Length: %d\r\n\r\n" % (RIGHT["Authorization"].encode(), len(body)) + body
    )
    with serving(models[0], tmp_path, "--deterministic", "--cores", core) as (process, ready), ExitStack() as stack:
        address = ready["host"], ready["port"]
        for _ in range(64):
            connection = stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S))
            connection.sendall(request)
        wait_for(lambda: running(address), "a response to be sampled")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "only loopback"),
        (("--slots", "0"), "--slots 0: must be at least 1"),
        (("--model", "nowhere"), "no config.json"),
        (("--port-file", "nowhere/port.json"), "there is no folder"),
    ],
)
def test_bad_arguments_are_refused_with_exit_code_2(models, tmp_path, arguments, message):
    run = subprocess.run(
        command(models[0], tmp_path / "port.json", *arguments), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
