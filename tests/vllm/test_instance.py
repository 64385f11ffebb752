"""The protocol of a rollout instance, answered by a real vLLM (CPU): a tied model, one process."""

import concurrent.futures
import time
from pathlib import Path

import psutil
import pytest
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families

from engine.wire.rollout_messages import ROLLOUT_PROTOCOL
from support.fuzz_routes import Server, fuzz_all, fuzz_update
from support.runs import wait_for
from support.tiny_models import VOCABULARY, reference, reference_logprobs, save
from support.vllm_instance import (
    CONTEXT,
    PROMPT,
    TOKEN,
    Sender,
    cpu_seconds,
    file_infos,
    gap,
    self_test,
    serving,
    until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
GIVEN = {"gpu_memory_utilization": 0.4, "max_num_batched_tokens": 512, "compilation_config": {"cudagraph_mode": "NONE"}}
"""Arguments of vLLM, as rollout.vllm has them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [
        Path(save(folder / name, seed=seed, tie_word_embeddings=True, head_dim=16)) for seed, name in enumerate("ab")
    ]


@pytest.fixture(scope="module")
def instance(models, tmp_path_factory):
    with serving(models[0], tmp_path_factory.mktemp("instance"), vllm=GIVEN) as (client, child):
        assert client.address["pid"] == child.pid
        yield client


@pytest.fixture
def client(instance, models):
    """With the base weights, version 0."""
    yield instance
    instance.post("/pause?mode=abort")
    if instance.version() != 0:
        instance.perturb([], 0)
    instance.post("/resume")


def test_read_only_routes(client):
    assert client.ask("GET", "/health") == (200, {"protocol": ROLLOUT_PROTOCOL, "world_size": 1})
    load = client.ask("GET", "/load")[1]
    counts = {"generated_tokens": 0, "prefills": 0}
    assert load | counts == {"running": 0, "waiting": 0, "weight_version": 0} | counts
    metrics = requests.get(client.url + "/metrics", headers=client.session.headers, timeout=10)
    families = {family.name for family in text_string_to_metric_families(metrics.text)}
    assert "vllm:generation_tokens" in families
    (told,) = (
        sample
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    )
    assert told.labels["gpu_memory_utilization"] == "0.4"
    own = ("running", "waiting", "weight_version", "generated_tokens", "prefills", "weight_updates")
    assert families >= {f"metronome_instance_{name}" for name in own}


def test_its_processes_leave_the_cores_to_others_while_they_wait(client):
    """vLLM's own way is to spin for a second after each message."""
    processes = psutil.Process(client.address["pid"]).children(recursive=True)
    client.complete()
    started = time.monotonic()
    before = cpu_seconds(processes)
    time.sleep(0.6)
    assert cpu_seconds(processes) - before < 0.4 * (time.monotonic() - started)  # spinning: 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(client, models, temperature):
    reply = client.complete(
        max_tokens=60,
        seed=3,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        n=1,
        logprobs=0,
        return_token_ids=True,
        stop_token_ids=[],
    )
    choice = reply["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (60, "length")
    assert reply["weight_versions"] == [[0, 0]]
    assert reply["weight_version"] == 0
    assert gap(choice, models[0], temperature) < 1e-4


def test_prompt_logprobs_are_those_of_transformers_whatever_the_temperature(client, models):
    entries = client.choice(prompt_logprobs=0, temperature=0.5)["prompt_logprobs"]
    assert entries[0] is None
    assert [list(entry) for entry in entries[1:]] == [[str(token)] for token in PROMPT[1:]]
    found = torch.tensor([entry[str(token)]["logprob"] for entry, token in zip(entries[1:], PROMPT[1:], strict=True)])
    expected = reference_logprobs(reference(models[0]), PROMPT[:1], PROMPT[1:])
    assert (found - expected).abs().max() < 1e-4


def test_a_seed_fixes_the_response_up_to_the_largest(client):
    for seed in (0, 2**63 - 1, -(2**63)):
        assert client.choice(seed=seed)["token_ids"] == client.choice(seed=seed)["token_ids"]
    assert len({tuple(client.choice(seed=seed)["token_ids"]) for seed in range(4)}) > 1


def test_a_stop_token_belongs_to_the_response(client, models):
    greedy = client.choice(temperature=0)["token_ids"]
    choice = client.choice(temperature=0, stop_token_ids=[greedy[3]])
    assert choice["token_ids"] == greedy[: greedy.index(greedy[3]) + 1]
    assert choice["finish_reason"] == "stop"
    for seed in range(200):  # the model's end of sequence stops by itself
        choice = client.choice(seed=seed, max_tokens=90, ignore_eos=False)
        if choice["finish_reason"] == "stop":
            break
    assert choice["token_ids"].index(1) == len(choice["token_ids"]) - 1


def test_max_tokens_is_cut_to_the_context(client):
    choice = client.choice(max_tokens=10**6)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (CONTEXT - len(PROMPT), "length")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'"x"',
        b"[" * 20000,
        b'{"prompt": [2], "x": "\xff"}',
        {},
        {"prompt": []},
        {"prompt": "text"},
        {"prompt": [VOCABULARY]},
        {"prompt": [-1]},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": [2] * CONTEXT},
        {"prompt": [2], "n": 2},
        {"prompt": [2], "temperature": 1e-9},
        {"prompt": [2], "temperature": "hot"},
        {"prompt": [2], "temperature": 10**400},
        {"prompt": [2], "max_tokens": -1},
        {"prompt": [2], "max_tokens": 2**40},
        {"prompt": [2], "stream": True},
        {"prompt": [2], "seed": 2**63},
        {"prompt": [2], "top_p": 0},
        {"prompt": [2], "top_k": 1.5},
        {"prompt": [2], "stop_token_ids": [10**9]},
        {"prompt": [2], "prompt_logprobs": 5},
        {"prompt": [2], "logprobs": False},
        b'{"prompt": [2], "temperature": NaN}',
        b'{"prompt": [2], "top_p": Infinity}',
    ],
)
def test_malformed_completions_are_400_without_effect(client, body):
    before = client.ask("GET", "/load")
    raw = {"data": body} if isinstance(body, bytes) else {"json": body}
    reply = client.session.post(client.url + "/v1/completions", timeout=30, **raw)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert error["message"]
    assert client.ask("GET", "/load") == before


def test_other_client_errors(client):
    assert client.ask("POST", "/pause?mode=keep", {})[0] == 400
    assert client.ask("GET", "/v1/completions")[0] == 405
    for route in (
        "/collective_rpc",
        "/v1/models",
        "/abort_requests",
        "/server_info",
        "/sleep",
    ):  # vLLM's own, behind the layer
        assert client.ask("POST", route, {})[0] == 404
    assert client.session.post(client.url + "/v1/completions", data=b" " * 2**20, timeout=30).status_code == 413
    assert (
        client.session.post(client.url + "/update_weights", data=b" " * (16 * 2**20 + 1), timeout=30).status_code == 413
    )


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}])
def test_every_route_but_health_wants_the_token(client, header):
    before = client.choice(seed=1)
    assert requests.get(client.url + "/health", headers=header, timeout=30).status_code == 200
    for method, route in (
        ("POST", "/v1/completions"),
        ("GET", "/load"),
        ("GET", "/metrics"),
        ("POST", "/pause"),
        ("POST", "/begin_weight_update"),
        ("POST", "/update_weights"),
        ("GET", "/nothing"),
    ):
        reply = requests.request(method, client.url + route, headers=header, json={}, timeout=30)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "UnauthorizedError")
    assert client.choice(seed=1) == before


def test_weights_go_there_and_back_by_file(client, models, tmp_path):
    for version, model in ((1, models[1]), (2, models[0]), (3, models[1])):
        client.update(file_infos(model, tmp_path / str(version), version), version)
        assert client.version() == version
        reply = client.complete(max_tokens=40, seed=version)
        assert reply["weight_versions"] == [[0, version]]
        assert gap(reply["choices"][0], model) < 1e-4


def cached(client):
    """Prompt tokens that vLLM took from its prefix cache so far."""
    text = requests.get(client.url + "/metrics", headers=client.session.headers, timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))


def test_what_it_keeps_of_a_prompt_ends_with_the_version(client, models, tmp_path):
    """A prompt of two whole blocks of 32 tokens and some more: its second completion takes both from the cache."""
    prompt = [2 + 7 * number % 59 for number in range(70)]
    began = cached(client)
    for version, model in enumerate(models):
        if version:
            client.update(file_infos(model, tmp_path / str(version), version), version)
        for _ in range(2):
            assert gap(client.choice(prompt=prompt), model, prompt=prompt) < 1e-4
        wait_for(lambda: cached(client) - began >= 64 * (version + 1), "the count of what the cache gave")  # noqa: B023
        assert cached(client) - began == 64 * (version + 1)  # 64 more where the first took what the last version left


def test_weights_go_there_and_back_by_gloo(client, models):
    sender = Sender(client, 2)
    for version, model in ((1, models[1]), (2, models[0])):
        client.update(sender.infos(model, version), version)
        assert client.version() == version
        assert gap(client.choice(max_tokens=40), model) < 1e-4


@pytest.mark.parametrize("transport", ["file", "gloo"])
def test_staged_weights_arrive_while_it_generates(client, models, tmp_path, transport):
    infos = file_infos(models[1], tmp_path / "1", 1) if transport == "file" else Sender(client, 2).infos(models[1], 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.choice, max_tokens=90, seed=5)
        for info in infos:
            client.post("/update_weights", {"update_info": info | {"staged": True}})
        assert client.version() == 0
        assert gap(running.result(), models[0]) < 1e-4
    client.update([{"transport": "staged", "version": 1}], 1)
    assert client.version() == 1
    assert gap(client.choice(max_tokens=40), models[1]) < 1e-4


def test_the_self_test_of_the_weight_sync_passes(client):
    self_test(client)


def test_the_self_test_moves_the_log_probabilities_and_restores_them(client):
    before = client.probe()
    client.perturb([3, 6], 0)
    moved = (client.probe() - before).abs()
    assert moved.max() > 0.1
    client.perturb([], 0)
    assert torch.equal(client.probe(), before)


def test_a_corrupted_tensor_is_refused_by_name_and_the_old_weights_stay(client, models, tmp_path):
    infos = list(file_infos(models[1], tmp_path / "1", 1))
    assert len(infos) > 3
    before = client.choice(seed=9)
    client.post("/begin_weight_update?mode=wait")
    wrong = infos[0] | {"checksums": ["0" * 16, *infos[0]["checksums"][1:]]}
    error = client.post("/update_weights", {"update_info": wrong}, 400)["error"]
    assert infos[0]["names"][0] in error["message"]
    client.post("/finish_weight_update", {"weight_version": 1}, 409)
    client.post("/resume")
    assert client.version() == 0
    assert client.choice(seed=9) == before


def test_a_mixture_of_weights_is_not_served(client, models, tmp_path):
    infos = list(file_infos(models[1], tmp_path / "1", 1))
    client.post("/begin_weight_update?mode=wait")
    client.post("/update_weights", {"update_info": infos[0]})
    client.post("/resume", status=409)
    error = client.post("/update_weights", {"update_info": infos[1] | {"shapes": [[1]] * len(infos[1]["names"])}}, 400)
    assert error["error"]["type"] == "BadRequestError"
    client.post("/resume", status=409)
    client.post("/begin_weight_update")  # without the last bucket
    for info in infos[:-1]:
        client.post("/update_weights", {"update_info": info})
    error = client.post("/finish_weight_update", {"weight_version": 1}, 409)
    assert infos[-1]["names"][0] in error["error"]["message"]
    client.post("/resume", status=409)
    client.update(infos, 1)
    assert gap(client.choice(max_tokens=40), models[1]) < 1e-4


def test_an_update_that_begins_anew_forgets_its_first_half(client, models, tmp_path):
    infos = list(file_infos(models[1], tmp_path / "1", 1))
    client.post("/begin_weight_update?mode=wait")
    for info in infos[: len(infos) // 2]:
        client.post("/update_weights", {"update_info": info})
    client.update(infos, 1)
    assert gap(client.choice(max_tokens=40), models[1]) < 1e-4


def test_the_wrong_order_and_malformed_updates_have_no_effect(client, models, tmp_path):
    info = next(file_infos(models[1], tmp_path / "1", 1))
    before = client.choice(seed=9)
    client.post("/pause?mode=wait")
    client.post("/update_weights", {"update_info": info}, 409)
    client.post("/finish_weight_update", {"weight_version": 1}, 409)
    for body in (
        {},
        {"update_info": 3},
        {"update_info": {}},
        {"update_info": info | {"transport": "pigeon"}},
        {"update_info": info | {"names": 3}},
        {"update_info": info | {"path": "nowhere"}},
    ):
        client.post("/begin_weight_update")
        client.post("/update_weights", body, 400)
        client.post("/begin_weight_update")
        client.post("/finish_weight_update", {"weight_version": -1}, 400)
        client.post("/finish_weight_update", {"weight_version": 1}, 409)
    client.post("/init_weight_transfer_engine", {"init_info": {"transport": "pigeon"}}, 400)
    client.post("/resume")
    assert client.version() == 0
    assert client.choice(seed=9) == before


def test_pause_holds_completions_back_until_resume(client):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        client.post("/pause?mode=wait")
        early = pool.submit(client.complete)
        until(client, waiting=1)
        client.perturb([], 7)  # ends with resume
        assert early.result()["weight_versions"] == [[0, 7]]


def test_pause_abort_answers_at_once_with_partial_tokens(client):
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        running = [pool.submit(client.choice, max_tokens=90) for _ in range(40)]
        until(client, running=8)
        client.post("/pause?mode=abort")
        choices = [each.result() for each in running if each.done()]
        client.post("/resume")
    assert "abort" in {choice["finish_reason"] for choice in choices}
    for choice in choices:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])


def test_a_disconnect_cancels_the_request(client):
    ask = {"headers": client.session.headers, "json": {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True}}
    client.post("/pause?mode=wait")
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(client.url + "/v1/completions", timeout=1, **ask)
    until(client, running=0, waiting=0)
    client.post("/resume")
    for _ in range(20):  # on a busy machine a reply may be there before the client looks at its clock
        try:
            requests.post(client.url + "/v1/completions", timeout=0.02, **ask)
        except requests.exceptions.ReadTimeout:
            break
    else:
        pytest.fail("every reply came within 20 ms")
    until(client, running=0, waiting=0)


def test_no_request_brings_it_down(client):
    """The routes' fuzz test; the full one: tests/support/fuzz_routes.py."""
    server = Server(client.address["host"], client.address["port"], TOKEN, 60.0)
    fuzz_all(server, 15)
    fuzz_update(server, 10)
