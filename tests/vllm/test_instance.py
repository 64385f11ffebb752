"""What of a real vLLM (CPU) the rules of the protocol do not show: tests/contract tries those on it, too."""

import concurrent.futures
import time
from pathlib import Path

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from support.runs import wait_for
from support.tiny_models import save
from support.vllm_instance import (
    Sender,
    cpu_seconds,
    file_infos,
    gap,
    serving,
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


def test_it_has_vllms_metrics_and_the_recipes_arguments(client):
    metrics = requests.get(client.url + "/metrics", headers=client.session.headers, timeout=10)
    samples = [sample for family in text_string_to_metric_families(metrics.text) for sample in family.samples]
    assert {"vllm:generation_tokens_total", "metronome_instance_prefills_total"} <= {sample.name for sample in samples}
    (told,) = [sample for sample in samples if sample.name == "vllm:cache_config_info"]
    assert told.labels["gpu_memory_utilization"] == "0.4"


@pytest.mark.parametrize("route", ["/collective_rpc", "/v1/models", "/abort_requests", "/server_info", "/sleep"])
def test_vllms_own_routes_are_behind_ours(client, route):
    assert client.ask("POST", route, {})[0] == 404


def test_its_processes_leave_the_cores_to_others_while_they_wait(client):
    """vLLM's own way is to spin for a second after each message."""
    processes = psutil.Process(client.address["pid"]).children(recursive=True)
    client.complete()
    started = time.monotonic()
    before = cpu_seconds(processes)
    time.sleep(0.6)
    assert cpu_seconds(processes) - before < 0.4 * (time.monotonic() - started)  # spinning: 1.0


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
