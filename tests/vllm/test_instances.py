"""vLLM instances with two processes, with the stale head on purpose, and without a parent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from engine import platform
from engine.config import Config
from engine.errors import ProcessDied, WeightSyncError
from engine.instance.vllm.session import KEEP_STALE_HEAD
from engine.run.vllm_command import instance_command_line
from engine.tools.acceptance.run_parts import MEDIUM, make_model
from engine.trainer.ranks.models import open_models
from engine.wire.messages import BucketInfo
from support.runs import ROOT, Tree, wait_for
from support.tiny_models import VOCABULARY, reference, save
from support.vllm_instance import (
    PROMPT,
    TOKEN,
    Client,
    Sender,
    config,
    file_infos,
    gap,
    in_buckets,
    led,
    self_test,
    serving,
    until,
    written,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DRAWS = 800
PARENT = """
import sys, time
from pathlib import Path
from support.vllm_instance import serving
with serving(Path(sys.argv[1]), Path(sys.argv[2])):
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return [Path(save(tmp_path_factory.mktemp("tied"), seed=seed, tie_word_embeddings=True)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return [Path(save(tmp_path_factory.mktemp("untied"), seed=seed, tie_word_embeddings=False)) for seed in (0, 1)]


def test_both_processes_of_an_untied_model_get_the_weights(untied, tmp_path):
    with serving(untied[0], tmp_path, tensor=2) as (client, _):
        assert client.ask("GET", "/health")[1]["world_size"] == 2
        assert gap(client.choice(max_tokens=40), untied[0]) < 1e-4
        client.update(file_infos(untied[1], tmp_path / "1", 1), 1)
        assert gap(client.choice(max_tokens=40), untied[1]) < 1e-4
        client.update(Sender(client, 3).infos(untied[0], 2), 2)
        assert client.version() == 2
        assert gap(client.choice(max_tokens=40), untied[0]) < 1e-4
        before = client.probe()
        client.perturb([3, 6], 2)
        assert (client.probe() - before).abs().max() > 0.1
        client.perturb([], 2)
        assert torch.equal(client.probe(), before)
        wrong = list(file_infos(untied[1], tmp_path / "3", 3))[0] | {"checksum": None}
        client.post("/begin_weight_update?mode=wait")
        client.post("/update_weights", {"update_info": wrong}, 400)
        client.post("/resume")
        assert torch.equal(client.probe(), before)


@pytest.fixture(scope="module")
def pair(untied, tmp_path_factory):
    """(client, child) of two instances of one model."""
    folder = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        begin = [serving(untied[0], folder / name) for name in "ab"]
        yield list(threads.map(stack.enter_context, begin))


def test_responses_without_a_seed_differ_also_between_instances_and_are_samples_of_the_model(pair, untied):
    """Two instances get the same requests in the same order, as when one is started again."""
    clients = [client for client, _ in pair]
    one, other = [[client.choice(temperature=2)["token_ids"] for _ in range(8)] for client in clients]
    assert not set(map(tuple, one)) & set(map(tuple, other))
    with ThreadPoolExecutor(8) as threads:
        for client in clients:
            group = threads.map(lambda _, client=client: client.choice(temperature=2)["token_ids"], range(8))
            assert len(set(map(tuple, group))) == 8
        firsts = threads.map(lambda n: clients[n % 2].choice(max_tokens=1)["token_ids"][0], range(DRAWS))
        found = torch.bincount(torch.tensor(list(firsts)), minlength=VOCABULARY)
    with torch.no_grad():
        expected = DRAWS * reference(untied[0])(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1)
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    assert chi_square < VOCABULARY - 1 + 5 * (2 * (VOCABULARY - 1)) ** 0.5, (found, expected)


def test_a_server_whose_engine_dies_ends(pair):
    """Its request fails at once and the process ends, so that the orchestrator starts another one. The last test of
    the pair."""
    client, child = pair[1]
    client.choice()
    engine = Tree(child.pid).named("EngineCore")
    engine.suspend()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(client.ask, "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 8})
        until(Client(client.address, TOKEN), running=1)
        engine.kill()
        status, reply = under_way.result(timeout=15)
    assert status == 500, reply
    wait_for(lambda: not child.alive, "the server to end", 15)


def test_an_instance_whose_batches_change_a_bit_refuses_to_start(tmp_path):
    """vLLM has no batch-invariant kernels for CPUs: those that it has there add up in another order in a batch of
    another size. Sums over a few dozen numbers, as in the models of the other tests, are too short for that."""
    wide = make_model(tmp_path / "wide", MEDIUM)
    message = (
        r"under-test exited with 2; (?s:.*)under-test: rollout\.deterministic = true, but vLLM [0-9.]+ on cpu "
        r"\(VLLM_BATCH_INVARIANT is not set\) gives different bits for the same request in a full batch.*: the "
        r"log-probability of its token \d+ is -\d+\.\d+ instead of -\d+\.\d+. Set rollout\.deterministic = false, or "
    )
    with pytest.raises(ProcessDied, match=message), serving(wide, tmp_path, deterministic=True):
        pytest.skip("on this CPU a batch changes no bit of a model of this width")


@contextlib.contextmanager
def trainer(model, dtype):
    """The trainer's models from a folder, computed in `dtype`."""
    given = Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "algorithm": {"kl_coef": 0},
            "train": {"dtype": dtype, "ratio_gap_limit": 0},
            "rollout": {"engine": "vllm"},
        }
    )
    with platform.single_session(platform.get_platform("cpu")):
        yield open_models(given, platform.get_platform("cpu"))


def publish(models, folder, version, measured, wrong=()):
    """What the weight sync does with one instance; the tensors called `wrong` have their sign changed on the way.
    `measured`: what the comparisons have found so far."""

    async def act(steps, instance):
        tensors = [(name, -tensor if name in wrong else tensor) for name, tensor in models.tensors()]
        during = f"weight version {version}"
        await steps.begin_update(instance, during)
        for info in written(in_buckets(tensors, torch.bfloat16), folder, version):
            await steps.update_weights(instance, msgspec.convert(info, BucketInfo), during)
        found = await steps.finish_update(instance, version, during)
        if measured:
            steps.keep_noise(measured[0])
        measured.append(steps.compare_probe(instance, version, found, models.probe(steps.probe.token_ids)))

    return act


def test_a_bf16_instance_computes_what_the_trainer_does_and_one_with_a_wrong_tensor_is_named(tied, tmp_path):
    """The trainer keeps its weights in fp32 or in bf16; what it sends is bf16."""
    with serving(tied[0], tmp_path, dtype="bfloat16") as (client, _):
        self_test(client, "bfloat16")
        for version, dtype in ((1, "float32"), (3, "bfloat16")):
            with trainer(tied[1], dtype) as models:
                measured = []
                led(client, publish(models, tmp_path / f"{version}", version, measured), "bfloat16")
                assert client.version() == version
                tensor = ["model.layers.1.mlp.down_proj.weight"]
                folder = tmp_path / f"{version + 1}"
                wrong = publish(models, folder=folder, version=version + 1, measured=measured, wrong=tensor)
                message = (
                    rf"under-test: after the update to weight version {version + 1} .* mean difference .*, limit 0.02"
                )
                with pytest.raises(WeightSyncError, match=message):
                    led(client, wrong, "bfloat16")


def test_the_self_test_sees_a_stale_tied_head(tmp_path):
    """vLLM's own behaviour, without our repair: rows of the output layer change and no log-probability moves.

    Of a Llama, whose tied head is a layer of its own in every release; vLLM 0.23 gives a tied Qwen3 none.
    """
    tied = [Path(save(tmp_path / name, "llama", seed=seed, tie_word_embeddings=True)) for seed, name in enumerate("ab")]
    with serving(tied[0], tmp_path, **{KEEP_STALE_HEAD: "1"}) as (client, _):
        assert gap(client.choice(max_tokens=40), tied[0]) < 1e-4
        with pytest.raises(WeightSyncError, match="under-test: self-test failed"):
            self_test(client)
        client.update(file_infos(tied[1], tmp_path / "1", 1), 1)
        assert gap(client.choice(max_tokens=40), tied[1]) > 0.1  # what it would have trained on


def test_processes_end_with_their_parent_and_with_the_server(tied, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tied[0]), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    try:
        port_file = tmp_path / "port.json"
        wait_for(lambda: port_file.exists() or parent.poll() is not None, "the instance", 180)
        address = json.loads(port_file.read_text())
        tree = Tree(parent.pid)
        names = [line for _, line in tree.command_lines()]
        assert any("EngineCore" in name for name in names), names
        assert any("Worker" in name for name in names), names
        Client(address, TOKEN).choice()
        parent.send_signal(signal.SIGKILL)
        assert tree.left(15.0) == []
    finally:
        parent.kill()
        parent.wait()
        if psutil.pid_exists(address["pid"]):
            os.kill(address["pid"], signal.SIGKILL)


def test_processes_end_with_a_server_that_is_killed(tied, tmp_path):
    """Also while it loads: nothing of it is left to load on."""
    arguments, env = instance_command_line(
        config=config(), model=tied[0], name="under-test", number=0, port_file=tmp_path / "port.json"
    )
    with subprocess.Popen(arguments, env=os.environ | env, start_new_session=True) as server:
        try:
            wait_for(
                lambda: any("EngineCore" in line for _, line in Tree(server.pid).command_lines()),
                "the engine's process",
            )
            tree = Tree(server.pid)
        finally:
            server.kill()
    assert tree.left(15.0) == []
