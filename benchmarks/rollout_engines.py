"""Tokens per CPU-second of rollout engines: embedded, vLLM and transformers' `generate` on the same workload of mixed
lengths.

`python benchmarks/rollout_engines.py [--groups 24] [--rounds 3]`

Prompts have 16 to 128 tokens, in groups of 8. Response lengths are log-normal (median 64, at most 256) and fixed per
request, so all engines sample the same number of tokens. Every engine returns the log-probability of each token. The
model is a random fp32 Qwen3 of hidden 128, 4 layers, vocabulary 512 and heads of 32 (vLLM's CPU attention supports no
smaller heads). Servers are real processes behind HTTP, and user and system time of all their processes count. There are
64 responses at a time and one computing thread.

`generate` has no queue: it runs batches, each until its longest response is done. It runs once with the requests in
order of arrival (whole groups together), as a trainer would call it without knowing the lengths, and once sorted by
response length, which is its best case. Prompts are padded on the left, as it requires. Sampling is its own, with
attention by SDPA; log-probabilities come from its `output_logits`. The batch size 16 is the best of 16, 32, 64 and 128
for both (--batch).

`--turns PROMPT` measures instead episodes of six turns on the embedded engine: a prompt of this many tokens (with what
describes the tools), shared by a group of 8, turns of 32 sampled tokens, and 64 tokens of a tool between them. With
`--conversations`, as in runs with `rollout.program`, a turn computes what is new; without it, the whole conversation.
Only sampled tokens count.

`--decode FOLDER` measures instead a decoding step of the embedded engine with a real model, in fp32 and, if the
processor has it, in bf16: CPU time of one thread with 32 and 64 responses of about 100 tokens. Beside it stand the two
bounds of the machine: operations over the speed of a large product in the same dtype, and bytes of weights and of the
cache's keys and values over the bandwidth of a plain copy (read and written bytes).

Last line: RESULT {json}; vLLM is null if its environment (`make vllm`) is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import torch
from common import result
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.config.recipe import HOME
from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.embedded.rollout_model import RolloutModel, bfloat16_available
from engine.instance.protocol import Sampling

VOCABULARY = 512
CONTEXT = 384
SLOTS = 64
GROUP = 8
TURNS = 6
TURN = 32
TOOL = 64
START_S = 300.0
ROUND_S = 600.0
TOKEN = "token-of-the-benchmark"
VLLM = HOME / ".venv-vllm/bin/python"


@dataclass(frozen=True)
class Request:
    """One response to sample, of exactly `tokens` tokens."""

    prompt: tuple[int, ...]
    tokens: int
    seed: int
    turns: int = 1
    """Number of turns of `tokens` / `turns` tokens each, with TOOL tokens of a tool between them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="batch size of generate")
    parser.add_argument("--turns", type=int, metavar="PROMPT", help="measure episodes with prompts of this length")
    parser.add_argument("--decode", type=Path, metavar="FOLDER", help="model whose decoding steps are measured")
    parser.add_argument("--only", nargs="*", help="sides to run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.decode is not None:
        result(decode_figures(arguments.decode, arguments.rounds))
        return
    requests = episodes(arguments.groups, arguments.turns) if arguments.turns else workload(arguments.groups)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = random_model(Path(folder) / "model")
        sides = {
            name: start
            for name, start in (
                turn_sides(model, requests) if arguments.turns else every_side(model, requests, arguments.batch)
            ).items()
            if not arguments.only or name in arguments.only
        }
        running = {name: stack.enter_context(start()) for name, start in sides.items()}
        rates = measure(running, sum(request.tokens for request in requests), arguments.rounds)
    (report_turns if arguments.turns else report)(requests, rates)


def random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def workload(groups: int) -> list[Request]:
    """The requests, the same for all engines. Prompts are equal within a group; lengths differ."""
    draw = random.Random(0)
    requests = []
    for number in range(groups):
        length = round(math.exp(draw.uniform(math.log(16), math.log(128))))
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(length))
        for seed in range(GROUP):
            tokens = min(max(round(64 * math.exp(draw.gauss(0, 0.6))), 4), 256)
            requests.append(Request(prompt, tokens, GROUP * number + seed))
    return requests


def episodes(groups: int, length: int) -> list[Request]:
    """The requests of --turns."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(VOCABULARY) for _ in range(length)) for _ in range(groups)]
    return [
        Request(prompt, TURNS * TURN, GROUP * number + seed, TURNS)
        for number, prompt in enumerate(prompts)
        for seed in range(GROUP)
    ]


Side = Callable[[], float]
"""A function that runs the workload once and returns its CPU seconds."""


def every_side(
    model: Path, requests: list[Request], batch: int
) -> dict[str, Callable[[], AbstractContextManager[Side]]]:
    limits = ["--slots", str(SLOTS), "--max-context", str(CONTEXT), "--threads", "1"]
    embedded = [sys.executable, "-m", "engine.instance.embedded", *limits]
    vllm = [str(VLLM), "-m", "engine.instance.vllm", *limits]
    longest_first = sorted(requests, key=lambda request: -request.tokens)
    sides: dict[str, Callable[[], AbstractContextManager[Side]]] = {
        "embedded": lambda: served(embedded, model, requests),
        "embedded_deterministic": lambda: served([*embedded, "--deterministic"], model, requests),
        "generate": lambda: generating(model, requests, batch),
        "generate_sorted": lambda: generating(model, longest_first, batch),
    }
    if VLLM.is_file():
        sides["vllm"] = lambda: served(vllm, model, requests)
    else:
        print("vLLM is left out: its environment is missing (make vllm)")
    return sides


def turn_sides(model: Path, requests: list[Request]) -> dict[str, Callable[[], AbstractContextManager[Side]]]:
    """Both ways, in both modes."""
    context = len(requests[0].prompt) + TURNS * TURN + (TURNS - 1) * TOOL
    command = [sys.executable, "-m", "engine.instance.embedded", "--slots", str(SLOTS)]
    command += ["--max-context", str(context), "--threads", "1"]
    ways = {"again": [], "kept": ["--conversations"]}
    modes = {"": [], "_deterministic": ["--deterministic"]}
    return {
        way + mode: lambda flags=(*ways[way], *modes[mode]): served([*command, *flags], model, requests)
        for mode in modes
        for way in ways
    }


def report_turns(requests: list[Request], rates: dict[str, list[float]]) -> None:
    found = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{len(requests)} episodes of {TURNS} turns, prompts of {len(requests[0].prompt)} tokens")
    print("sampled tokens per CPU-second (median, range):")
    for name, values in rates.items():
        print(f"  {name:24}{found[name]:8.0f}   {min(values):.0f} – {max(values):.0f}")
    figures = {f"{name}_tokens_per_cpu_s": value for name, value in found.items()}
    for mode in ("", "_deterministic"):
        if {"kept" + mode, "again" + mode} <= found.keys():
            figures[f"kept_over_again{mode}"] = found["kept" + mode] / found["again" + mode]
    result(figures | {"slots": SLOTS, "episodes": len(requests)})


def measure(sides: dict[str, Side], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per CPU-second of each side and round. The sides take turns, and a first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            seconds = side()
            if number:
                rates[name].append(tokens / seconds)
    return rates


def report(requests: list[Request], rates: dict[str, list[float]]) -> None:
    found = {name: statistics.median(values) for name, values in rates.items()}
    tokens = sum(request.tokens for request in requests)
    print(f"{len(requests)} requests, {tokens} tokens; tokens per CPU-second (median, range):")
    for name, values in rates.items():
        share = f"   {found[name] / found['generate']:.2f} × generate" if "generate" in found else ""
        print(f"  {name:24}{found[name]:8.0f}   {min(values):.0f} – {max(values):.0f}{share}")
    figures = {
        f"{name}_tokens_per_cpu_s": found.get(name)
        for name in ("embedded", "embedded_deterministic", "vllm", "generate", "generate_sorted")
    }
    for name in ("generate", "generate_sorted"):
        figures[f"embedded_over_{name}"] = (
            found["embedded"] / found[name] if {"embedded", name} <= found.keys() else None
        )
    result(figures | {"slots": SLOTS, "requests": len(requests)})


# the engines behind HTTP --------------------------------------------------------------------------


@contextmanager
def served(command: Sequence[str], model: Path, requests: list[Request]) -> Iterator[Side]:
    """Start a server process; yields the function that runs the workload on it."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "port.json"
        log = Path(folder) / "log"
        environment = os.environ | {"PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1", "METRONOME_TOKEN": TOKEN}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--model", str(model), "--port-file", str(ready)],
                env=environment,
                cwd=HOME,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_for(ready, process)
            address = json.loads(ready.read_text())
            yield lambda: cpu_seconds_of(process, f"http://{address['host']}:{address['port']}", requests)
        except BaseException:
            print(log.read_text(), file=sys.stderr)
            raise
        finally:
            end(process)


def wait_for(ready: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit(f"{process.args}: ended with {process.returncode} while it started")
        if time.monotonic() > deadline:
            raise SystemExit(f"{process.args}: was not ready within {START_S:.0f} s")
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def cpu_seconds_of(process: subprocess.Popen[bytes], address: str, requests: list[Request]) -> float:
    """User and system seconds of the server's processes for the workload."""
    root = psutil.Process(process.pid)
    tree = [root, *root.children(recursive=True)]
    before = used(tree)
    asyncio.run(asyncio.wait_for(complete_all(address, requests), ROUND_S))
    return used(tree) - before


def used(tree: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in tree))


async def complete_all(address: str, requests: list[Request]) -> None:
    """Send all requests at once, because the engine has a queue. Equal prompts are computed once per round."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        address,
        connector=connector,
        timeout=aiohttp.ClientTimeout(ROUND_S),
        headers={"Authorization": f"Bearer {TOKEN}"},
    ) as session:
        async with session.post("/reset_prefix_cache", json={}) as reply:
            reply.raise_for_status()
        await asyncio.gather(*(complete(session, request) for request in requests))


async def complete(session: aiohttp.ClientSession, request: Request) -> None:
    """Send the turns of a request, one after the other."""
    draw = random.Random(request.seed)
    conversation = list(request.prompt)
    for turn in range(request.turns):
        body = {
            "prompt": conversation,
            "max_tokens": request.tokens // request.turns,
            "seed": request.seed + 1000 * turn,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "ignore_eos": True,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with session.post("/v1/completions", json=body) as reply:
            reply.raise_for_status()
            choice = (await reply.json())["choices"][0]
        sampled = choice["token_ids"]
        if not len(sampled) == len(choice["logprobs"]["token_logprobs"]) == request.tokens // request.turns:
            raise SystemExit(f"{len(sampled)} tokens instead of {request.tokens // request.turns}")
        conversation = [*conversation, *sampled, *(draw.randrange(VOCABULARY) for _ in range(TOOL))]


# generate -----------------------------------------------------------------------------------------


@contextmanager
def generating(model: Path, requests: list[Request], batch: int) -> Iterator[Side]:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")

    def run() -> float:
        started = time.process_time()
        for first in range(0, len(requests), batch):
            generate(loaded, requests[first : first + batch])
        return time.process_time() - started

    yield run


@torch.inference_mode()
def generate(model: torch.nn.Module, batch: list[Request]) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of each request, cut to its length."""
    width = max(len(request.prompt) for request in batch)
    ids = torch.tensor([(0,) * (width - len(request.prompt)) + request.prompt for request in batch])
    mask = torch.tensor([[0] * (width - len(request.prompt)) + [1] * len(request.prompt) for request in batch])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(request.tokens for request in batch),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, width:]
    logprobs = [row.log_softmax(-1).gather(1, tokens[:, step, None])[:, 0] for step, row in enumerate(out.logits)]
    rows = zip(tokens.tolist(), torch.stack(logprobs, 1).tolist(), batch, strict=True)
    return [(row[: request.tokens], values[: request.tokens]) for row, values, request in rows]


# decoding steps of a real model -------------------------------------------------------------------


@torch.no_grad()
def decode_figures(folder: Path, rounds: int) -> dict[str, float]:
    """Time and bounds of decoding steps, by dtype and number of responses."""
    source = torch.randn(2**25)
    target = torch.empty_like(source)
    copying = 2 * source.nbytes / fastest(lambda: target.copy_(source), rounds)
    figures = {"copy_gb_per_s": copying / 1e9}
    for dtype in (torch.float32, *([torch.bfloat16] if bfloat16_available() else ())):
        model = RolloutModel(str(folder), CONTEXT, dtype)
        wide = model.layers[0].gate_up
        x = torch.randn(512, model.embed.shape[1])
        speed = 2 * len(x) * wide.weight.numel() / fastest(lambda w=wide, x=x: w(x), 5 * rounds)
        maps = [one for layer in model.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        parameters = sum(one.weight.numel() for one in (*maps, model.head))
        name = str(dtype).removeprefix("torch.")
        print(f"{name}: products {speed / 1e9:.0f} GFLOP/s, copies {copying / 1e9:.1f} GB/s")
        for responses in (32, SLOTS):
            seconds, cached = decode_step(model, responses, rounds)
            arithmetic = 2 * responses * parameters / speed
            memory = (parameters * dtype.itemsize + cached) / copying
            print(f"  {responses} responses: a step of {1e3 * seconds:.0f} ms, {responses / seconds:.0f} tokens/s")
            print(f"    arithmetic {1e3 * arithmetic:.0f} ms ({arithmetic / seconds:.0%})")
            print(f"    memory {1e3 * memory:.0f} ms ({memory / seconds:.0%})")
            figures |= {
                f"{name}_{responses}_tokens_per_s": responses / seconds,
                f"{name}_{responses}_arithmetic_share": arithmetic / seconds,
                f"{name}_{responses}_memory_share": memory / seconds,
            }
    return figures


def fastest(work: Callable[[], object], rounds: int) -> float:
    """Least CPU seconds of a call, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times[1:])


def decode_step(model: RolloutModel, responses: int, rounds: int) -> tuple[float, int]:
    """Median CPU seconds of the decoding steps at 88 to 104 tokens a response, and the bytes of keys and values that
    one of them reads."""
    draw = random.Random(0)
    engine = Engine(model, responses, CONTEXT)
    times = []
    for _ in range(rounds):
        prompts = [tuple(draw.randrange(model.vocabulary) for _ in range(88)) for _ in range(responses // GROUP)]
        for seed in range(responses):
            engine.submit(SamplingRequest(prompts[seed // GROUP], Sampling(16, seed=seed), lambda result: None))
        engine.step()
        while engine.busy:
            started = time.thread_time()
            engine.step()
            times.append(time.thread_time() - started)
    cached = 2 * engine.cache.keys[..., :96].nbytes
    return statistics.median(times), cached


if __name__ == "__main__":
    main()
