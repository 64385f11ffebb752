"""The part "completion": one rollout instance answers a prompt."""

from __future__ import annotations

import asyncio
import json
import math
import time
import urllib.request
from pathlib import Path

from engine.config import Config
from engine.run.commands import instance_command
from engine.run.instance_process import InstanceProcess
from engine.run.process import Child
from engine.tools.acceptance.notes import SLOWER_START_S, PartFailed, PartSkipped, PartTask
from engine.tools.acceptance.runs import LARGE, MEDIUM, configuration, machine_of, make_model, rollout_choice
from engine.types import JsonObject
from engine.wire.access_token import VARIABLE, authorization_headers, own_token
from engine.wire.address import http_url

PROMPT = list(b"12+30=")
"""Token ids. The model's tokenizer works on bytes."""
TOKENS = 64
START_S = 200.0
"""Time limit in seconds of the instance's start, without SLOWER_START_S. vLLM loads, compiles and captures graphs."""
REPLY_S = 60.0


def completion(task: PartTask) -> None:
    """Start an instance, and have it sample twice. Raises PartSkipped without vLLM on a device, and PartFailed for an
    invalid reply."""
    machine = machine_of(task)
    chosen = rollout_choice(machine, task.settings, training=False)
    if chosen.engine == "embedded" and machine.name != "cpu":
        raise PartSkipped(chosen.remark, f"make vllm DEVICE={machine.name}")
    if chosen.remark:
        task.notes.say(f"the embedded engine answers: {chosen.remark}")
    model = make_model(task.folder / "model", MEDIUM if machine.name == "cpu" else LARGE)
    given = {
        "run.name": "completion", "model.path": model, "rollout.max_context": 512, "rollout.max_new_tokens": TOKENS,
        "train.devices": [], "rollout.concurrency": 1,
    }  # fmt: skip
    config = configuration(task, machine, chosen, given)
    token = own_token()
    instance = _start(config, model, task.folder / "completion", token)
    try:
        task.notes.doing(f"the start of {instance.name} ({config.rollout.engine}), which writes {instance.child.log}")
        began = time.monotonic()
        host, port = asyncio.run(instance.serves(START_S + SLOWER_START_S.get(machine.name, 0.0)))
        started = time.monotonic() - began
        task.notes.doing(f"a completion of {instance.name}, which writes {instance.child.log}")
        _checked(_ask(http_url(host, port), token, seed=0))  # the first request compiles
        began = time.monotonic()
        tokens = _checked(_ask(http_url(host, port), token, seed=1))
        rate = tokens / (time.monotonic() - began)
    finally:
        instance.child.stop()
    task.notes.say(
        f"{config.rollout.engine} serves after {started:.1f} s, and answers one request with {tokens} tokens at "
        f"{rate:.0f} tokens/s"
    )
    task.notes.figures(engine=config.rollout.engine, start_s=started, tokens=tokens, tokens_per_s=rate)


def _start(config: Config, model: Path, folder: Path, token: str) -> InstanceProcess:
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / "address.json"
    command, env = instance_command(config=config, model=model, name="instance-0", number=0, port_file=port_file)
    child = Child("instance-0", command, folder / "instance-0.log", env | {VARIABLE: token})
    return InstanceProcess(0, child, port_file)


def _ask(url: str, token: str, seed: int) -> JsonObject:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **authorization_headers(token)}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        answer: JsonObject = json.loads(reply.read())
    return answer


def _checked(reply: JsonObject) -> int:
    """The number of sampled tokens. Raises PartFailed unless each has a valid log-probability."""
    choice = reply["choices"][0]
    tokens = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if (
        len(tokens) != TOKENS
        or len(logprobs) != TOKENS
        or not all(math.isfinite(one) and one <= 1e-4 for one in logprobs)
    ):
        raise PartFailed(
            f"the reply has {len(tokens)} tokens of {TOKENS}, and the log-probabilities {logprobs[:8]} ..."
        )
    return len(tokens)
