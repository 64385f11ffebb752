"""The service as programs outside use it: real instances, a real service process, faults of its clients."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from docs.examples.hf_trainer import HuggingFaceTrainer
from engine.client.service import ServiceClient
from engine.errors import BadInput, MetronomeError, ServiceConflict, WeightSyncError
from engine.run.folder import RunFolder
from engine.types import Prompt
from engine.wire.columns import pack_ids
from engine.wire.messages import (
    AbortSync,
    ConnectSync,
    Done,
    FinishSync,
    PromptData,
    PutPrompts,
    VerifySync,
)
from support.listening import Listening
from support.runs import ROOT, Tree, base_settings, config_of, wait_for

LEASE_S = 2.0
TOKEN = "a-secret"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
PROMPTS = 3
SIZE = 2
SMALL = {
    "rollout.group_size": SIZE,
    "rollout.instances": 2,
    "rollout.max_new_tokens": 6,
    "rollout.timeout_s": 30,
    "train.prompts_per_step": PROMPTS,
    "train.steps": 200,
    "train.timeout_s": LEASE_S,
}
CONSUMER = """
import sys, time
from engine.client.service import ServiceClient
lease = ServiceClient.init_engines(sys.argv[1]).get_experience_data(int(sys.argv[2]), "dead", 10**6)
print([group.index for group in lease.groups], flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def running(tiny_model, problems, tmp_path_factory):
    """A service of this module's own, its client, and a model whose next version can be published."""
    folder = tmp_path_factory.mktemp("service")
    os.environ["METRONOME_TOKEN"] = TOKEN
    try:
        config = config_of(base_settings(tiny_model, problems, folder) | SMALL)
        with ServiceClient.init_engines(config) as client:
            yield SimpleNamespace(
                client=client,
                model=HuggingFaceTrainer(client.config),
                folder=config.folder,
                address=(config.folder / "rollout.address").read_text().strip(),
                version=-1,
            )
    finally:
        del os.environ["METRONOME_TOKEN"]


@pytest.fixture
def step(running):
    """The next step, its weights published. The test must leave every group of it acknowledged."""
    running.version += 1
    running.client.weight_sync_notify(running.version, running.model)
    return running.version


@pytest.fixture
def client(running):
    return running.client


def test_service_and_instances_listen_on_loopback_only(running):
    seen = Listening()
    seen.look(psutil.Process())
    for part in ("orchestrator.serve", "instance.embedded"):
        assert any(part in name for name in seen.sockets.values()), seen.sockets
    assert seen.open_ones == {}


def sample(client, step):
    """Put the step's prompts, and wait until all of its groups have arrived."""
    client.put_prompts_data(step)
    status = f"{client.connection.url}/status"
    wait_for(lambda: httpx.get(status, headers=RIGHT).json()["arrived"] == [PROMPTS], "the step's groups", 60)


def leases(client, step, consumer="trainer"):
    lease = None
    while (lease := client.get_experience_data(step, consumer, trained=lease)) is not None:
        yield lease


def consume(client, step, consumer="trainer"):
    """The indices of the step's groups in the order of their training."""
    return [group.index for lease in leases(client, step, consumer) for group in lease.groups]


def finish(client, step):
    sample(client, step)
    consume(client, step)


def test_groups_of_a_consumer_that_is_killed_are_given_again_and_trained_once(running, client, step):
    sample(client, step)
    dead = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, running.address, str(step)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    held = json.loads(dead.stdout.readline())
    dead.kill()
    dead.wait()
    assert sorted(held) == [0, 1, 2]
    began = time.monotonic()
    lease = client.get_experience_data(step)
    assert time.monotonic() - began < LEASE_S + 3
    assert [group.index for group in lease.groups] == held
    assert lease.deliveries == 2
    client.acknowledge(lease)
    assert client.get_experience_data(step) is None


def test_a_trainer_that_was_started_again_trains_its_step_from_the_first_group_on(running, client, step):
    client.put_prompts_data(step)
    lost = client.get_experience_data(step, budget=1)
    client.acknowledge(lost)
    with ServiceClient.init_engines(running.address) as second:
        assert second.version == step
        second.weight_sync_notify(step, running.model)
        assert second.put_prompts_data(step) is False
        assert sorted(consume(second, step)) == [0, 1, 2]


def test_a_version_is_published_once_the_steps_before_are_trained(running, client, step):
    sample(client, step)
    with pytest.raises(ServiceConflict, match=f"not every group of step {step} is acknowledged"):
        client.weight_sync_notify(step + 1, running.model)
    with pytest.raises(ServiceConflict, match=f"version {step} was published last, so the next is {step + 1}"):
        client.weight_sync_notify(step + 5, running.model)
    consume(client, step)


def test_parts_of_a_publish_that_come_again_or_out_of_turn_change_nothing(running, client, step):
    """A second FinishSync made the service wait for a comparison, and the next publish ended it."""
    for _ in range(2):
        assert client.ask(FinishSync(version=step)) == Done()
    for request in (
        VerifySync(expected=()),
        AbortSync(version=step, reason=""),
        ConnectSync(version=step, transport="gloo", stages=()),
        FinishSync(version=step + 1),
    ):
        with pytest.raises(ServiceConflict):
            client.ask(request)
    finish(client, step)
    running.version += 1
    client.weight_sync_notify(running.version, running.model)
    finish(client, running.version)


def test_a_value_that_is_no_json_in_a_prompts_columns_is_refused_and_the_service_goes_on(running, client, step):
    """Bytes there ended the whole service."""
    with pytest.raises(BadInput, match="a prompt's columns travel as JSON"):
        client.put_prompts_data(step, [Prompt("", "1+1=", "2", (5, 6), columns={"raw": b"\x00"})] * PROMPTS)
    raw = (PromptData("1+1=", "2", pack_ids((5, 6)), columns=b"\x81\xa3raw\xc4\x01\x00"),) * PROMPTS
    with pytest.raises(BadInput, match="expected a JSON object"):
        client.ask(PutPrompts(step=step, prompts=raw))
    client.put_prompts_data(step, [Prompt("", "1+1=", "2", (5, 6), columns={"n": 10**30})] * PROMPTS)
    assert sorted(consume(client, step)) == [0, 1, 2]


def test_every_instance_holds_a_version_that_was_published(running, client, step):
    for name in ("instance-0", "instance-1"):
        there = json.loads((running.folder / f"logs/{name}.address").read_text())
        url = f"http://{there['host']}:{there['port']}/load"
        assert httpx.get(url, headers=RIGHT).json()["weight_version"] == step
    finish(client, step)


def test_own_prompts_are_sampled_and_scored(client, step):
    prompts = [
        Prompt(id="", problem=f"{n}+{n}=", answer=str(2 * n), token_ids=(50 + n, 44, 50 + n), columns={"row": n})
        for n in range(PROMPTS)
    ]
    assert client.put_prompts_data(step, prompts)
    assert client.put_prompts_data(step, prompts) is False
    with pytest.raises(ServiceConflict, match="has other prompts"):
        client.put_prompts_data(step)
    groups = {group.index: group for lease in leases(client, step, "trainer") for group in lease.groups}
    assert [groups[index].prompt.token_ids for index in range(PROMPTS)] == [one.token_ids for one in prompts]
    assert [groups[index].prompt.answer for index in range(PROMPTS)] == ["0", "2", "4"]


def test_samples_name_their_versions_and_follow_their_seeds(client, step):
    first, second = (client.sample([50, 44, 50], [1, 2]) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert all(one.versions == ((0, step),) for one in first)
    with pytest.raises(BadInput, match="token 0 is 99999"):
        client.sample([99999], [1])
    finish(client, step)


def test_a_client_needs_the_token_and_the_protocol(running, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("engine.client.connection.PROTOCOL", 99)
        with pytest.raises(BadInput, match="speaks version 99 of the plane's protocol"):
            ServiceClient(running.address)
    monkeypatch.delenv("METRONOME_TOKEN")
    with pytest.raises(BadInput, match="METRONOME_TOKEN"):
        ServiceClient(running.address)


@pytest.mark.slow
def test_a_service_whose_instances_died_says_so(settings, tmp_path):
    config = config_of(settings | {"rollout.restarts": 0, "rollout.wait_s": 1, "train.timeout_s": 9})
    with ServiceClient.init_engines(config) as client:
        model = HuggingFaceTrainer(client.config)
        client.weight_sync_notify(0, model)
        client.put_prompts_data(0)
        Tree(client._child.pid).named("engine.instance.embedded").kill()
        with pytest.raises(MetronomeError, match=r"instance-0|can't be reached"):
            consume(client, 0)


@pytest.mark.slow
def test_weights_with_which_the_instances_compute_otherwise_end_the_service(settings):
    class Other(HuggingFaceTrainer):
        def probe(self, token_ids):
            return [value - 1 for value in super().probe(token_ids)]

    with ServiceClient.init_engines(config_of(settings)) as client:
        with pytest.raises(WeightSyncError, match=r"instance-0: after the update to weight version 0 .* differ"):
            client.weight_sync_notify(0, Other(client.config))
        assert client._child.process.wait(30) == 1
    log = RunFolder(client.config.folder).logs / "service.log"
    assert "error: instance-0: after the update to weight version 0" in log.read_text()
