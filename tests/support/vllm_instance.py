"""A real vLLM instance for tests, started as the orchestrator starts it."""

import asyncio
import contextlib
import json
import threading
import time

import aiohttp
import requests
import torch

from engine.config import Config
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceClient
from engine.orchestrator.publish.probe import make_probe
from engine.orchestrator.publish.update_calls import UpdateCalls
from engine.run.commands import instance_command
from engine.run.process import Child
from engine.wire.weights import bucket_file, buckets
from engine.wire.weights.groups import Rendezvous
from engine.wire.weights.hf_folder import open_folder
from support.tiny_models import VOCABULARY, reference, reference_logprobs

START_S = 600.0
"""It takes half a minute; on two cores with ten other processes it took four."""
CONTEXT = 96
ROW = [2, 3, 4, 6, 8, 10]
"""Tokens of the probe."""
PROMPT = [5, 9, 20, 33, 7]
TOKEN = "a-token-of-the-tests"
BUCKET = 8192
"""Bytes: less than a layer, so that layers come in several buckets."""


def config(dtype="float32", **rollout):
    return Config.model_validate(
        {
            "model": {"dtype": dtype},
            "train": {"ratio_gap_limit": 0},
            "rollout": {
                "engine": "vllm",
                "instances": 1,
                "group_size": 4,
                "concurrency": 2,
                "max_context": CONTEXT,
                "max_new_tokens": CONTEXT - 1,
                **rollout,
            },
        }
    )


@contextlib.contextmanager
def serving(model, folder, tensor=1, token=TOKEN, dtype="float32", deterministic=False, vllm=None, **environment):
    """An instance, as (client, child)."""
    port_file = folder / "port.json"
    settings = config(dtype, tensor=tensor, deterministic=deterministic, vllm=vllm or {})
    arguments, env = instance_command(config=settings, model=model, name="under-test", number=0, port_file=port_file)
    child = Child(
        "under-test",
        arguments,
        folder / "vllm.log",
        env | {"METRONOME_TOKEN": token, "OMP_NUM_THREADS": "1", **environment},
    )
    try:
        deadline = time.monotonic() + START_S
        while not port_file.exists():
            child.check_alive()
            assert time.monotonic() < deadline, f"no port file within {START_S:g} s; {child.log}"
            time.sleep(0.05)
        yield Client(json.loads(port_file.read_text()), token), child
    finally:
        child.stop(20.0)


class Client:
    """Synchronous calls."""

    def __init__(self, address, token):
        self.address = address
        self.url = f"http://{address['host']}:{address['port']}"
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {token}"

    def ask(self, method, route, body=None, **extra):
        """(status, JSON)."""
        reply = self.session.request(method, self.url + route, json=body, timeout=60, **extra)
        return reply.status_code, reply.json() if reply.content else {}

    def post(self, route, body=None, status=200):
        got, reply = self.ask("POST", route, {} if body is None else body)
        assert got == status, reply
        return reply

    def version(self):
        return self.ask("GET", "/load")[1]["weight_version"]

    def complete(self, **body):
        return self.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True} | body)

    def choice(self, **body):
        return self.complete(**body)["choices"][0]

    def probe(self):
        """Log-probabilities of a fixed row of tokens."""
        entries = self.choice(prompt=ROW, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][1:]
        return torch.tensor([next(iter(entry.values()))["logprob"] for entry in entries])

    def update(self, infos, version, **update_info):
        """The whole sequence with these buckets."""
        self.post("/begin_weight_update?mode=wait")
        for info in infos:
            self.post("/update_weights", {"update_info": info | update_info})
        reply = self.post("/finish_weight_update", {"weight_version": version, "probe": ROW})
        assert reply["weight_version"] == version
        assert torch.tensor(reply["logprobs"]).sub(self.probe()).abs().max() < 1e-5

    def perturb(self, tokens, version):
        """The self-test's update: the base weights with changed output rows (none: as they were)."""
        self.update([{"transport": "base", "perturb": tokens}], version)


def until(client, **expected):
    """Wait until /load shows the expected numbers."""
    deadline = time.monotonic() + 20
    while not expected.items() <= (load := client.ask("GET", "/load")[1]).items():
        assert time.monotonic() < deadline, f"{load} never came to {expected}"


def cpu_seconds(processes):
    """What they have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def led(client, act, dtype="float32"):
    """What the weight sync does with an instance: `await act(steps, instance)`."""

    async def run():
        async with aiohttp.ClientSession(headers=dict(client.session.headers)) as session:
            instance = Instance(InstanceClient("under-test", client.url, session, 60.0))
            await act(UpdateCalls(make_probe(VOCABULARY, 32, CONTEXT, dtype), 60.0), instance)

    asyncio.run(run())


def self_test(client, dtype="float32"):
    """The weight sync's own; raises WeightSyncError."""
    led(client, UpdateCalls.self_test, dtype)
    client.post("/resume")


def gap(choice, folder, temperature=1.0, prompt=PROMPT):
    """Largest difference of a response's log-probabilities from transformers'."""
    expected = reference_logprobs(reference(folder), prompt, choice["token_ids"], temperature)
    return (torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max().item()


def packed(model):
    """The buckets of a Hugging Face folder's weights."""
    with open_folder(model) as files:
        tensors = [(name, files.read_tensor(name).clone()) for name in sorted(files.names)]
    yield from in_buckets(tensors)


def in_buckets(tensors, dtype=None):
    return buckets.pack_buckets(tensors, dtype, BUCKET, buckets.Buffers(100, 1.0))


def file_infos(model, folder, version):
    """update_infos of bucket files written there."""
    yield from written(packed(model), folder, version)


def written(packed_buckets, folder, version):
    folder.mkdir()
    for bucket in packed_buckets:
        path = folder / f"{bucket.number}.safetensors"
        bucket_file.write_bucket(path, bucket)
        yield {
            "transport": "file",
            "version": version,
            "stage": 0,
            "bucket": bucket.number,
            "path": str(path),
            **bucket.wire(),
        }


class Sender:
    """A pipeline stage's sender (gloo), in threads of the test."""

    def __init__(self, client, world):
        meeting = Rendezvous("127.0.0.1", "gloo", 30.0)
        made = []
        gather = threading.Thread(target=lambda: made.append(meeting.gather(world)), daemon=True)
        gather.start()
        client.post(
            "/init_weight_transfer_engine",
            {
                "init_info": {
                    "transport": "gloo",
                    "generation": 1,
                    "stages": [meeting.address],
                    "rank": 1,
                    "world_size": world,
                    "timeout_s": 30,
                }
            },
        )
        gather.join(30)
        self.group = made[0]

    def infos(self, model, version):
        """update_infos; each bucket is on its way when its own is given."""
        for bucket in packed(model):
            transfer = self.group.broadcast(*bucket.pieces())
            yield {"transport": "gloo", "version": version, "stage": 0, "bucket": bucket.number, **bucket.wire()}
            transfer.wait()
