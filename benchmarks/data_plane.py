"""What the orchestrator's core carries: `python benchmarks/data_plane.py [--against OTHER_CHECKOUT]`

The orchestrator's own parts run in one process. Around them, in processes of their own, are an instance that answers at
once with responses that were made before, verifiers (`reward.function = "exact"`), and a replica group of the trainer
that leases the windows and acknowledges them. Nothing is sampled or trained. Printed are

* tokens per orchestrator CPU-second: the response tokens of a step through the CPU seconds of the orchestrator's
process, all
  threads, from the step's start to its last acknowledgement, without the measuring of the queue;
* queue bytes per token: the size of all Python objects that the full queue holds, each counted once;
* verifier CPU per token: of the verifier processes.

`--against` measures another checkout of this repository in turn with this one: medians over `--repeats` of the means
over `--steps`, and the ratios. `--transferqueue` measures this checkout with `queue.store = "transferqueue"` in turn,
which needs the extra `transferqueue`. Last line: RESULT {json}.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "runs" / "data_plane"
"""Folder for the model that is made once. git ignores it."""
VOCABULARY = 32768
REPLIES = 8
"""Different responses, which the instance gives in turn."""
PROMPT = 200
"""Tokens of a prompt."""
OURS = "this checkout"
OTHER = "other checkout"
TRANSFERQUEUE = "this checkout, transferqueue"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--transferqueue", action="store_true", help="measure this store, too")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=8, help="that are measured, after one that warms up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the instance answers in JSON")
    parser.add_argument("--role", choices=["orchestrator", "instance", "replica_group"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="orchestrator", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "orchestrator":
        print(json.dumps(asyncio.run(orchestrator(arguments))), flush=True)
    elif arguments.role == "instance":
        asyncio.run(instance(arguments))
    elif arguments.role == "replica_group":
        replica_group(arguments)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Measure the checkouts in turn, and print the medians."""
    from common import result  # here, because its imports take seconds in each process

    model_folder()
    sides = {OURS: HERE.parent} | ({OTHER: arguments.against.resolve()} if arguments.against else {})
    sides |= {TRANSFERQUEUE: HERE.parent} if arguments.transferqueue else {}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(arguments.repeats):
        for name, checkout in sides.items():
            arguments.store = "transferqueue" if name == TRANSFERQUEUE else "orchestrator"
            found[name].append(measured(arguments, checkout))
            print(f"{number}, {name}: {found[name][-1]}", flush=True)
    figures: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()
    }
    ours = figures[OURS]
    if arguments.transferqueue:
        figures["transferqueue_times_the_cpu"] = figures[TRANSFERQUEUE]["cpu_us_per_token"] / ours["cpu_us_per_token"]
    if arguments.against:
        other = figures[OTHER]
        figures["times_the_tokens_per_cpu_s"] = ours["tokens_per_cpu_s"] / other["tokens_per_cpu_s"]
        figures["share_of_queue_bytes"] = ours["queue_bytes_per_token"] / other["queue_bytes_per_token"]
    sizes = {name: getattr(arguments, name) for name in ("prompts", "group", "length", "steps", "repeats", "json")}
    result({**sizes, **figures})


def measured(arguments: argparse.Namespace, checkout: Path) -> dict[str, float]:
    """The figures of one checkout, whose `engine` a process of its own imports."""
    with tempfile.TemporaryDirectory() as folder:
        line = command(arguments, "orchestrator", Path(folder))
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        done = subprocess.check_output(line, text=True, timeout=1800, cwd=folder, env=environment)
    return dict(json.loads(done.splitlines()[-1]))


def command(arguments: argparse.Namespace, role: str, folder: Path) -> list[str]:
    """The command line of one process of a measurement."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("prompts", "group", "length", "steps")]
    sizes += ["--json"] if arguments.json else []
    sizes += ["--store", arguments.store] if arguments.store != "orchestrator" else []
    return [sys.executable, str(HERE / "data_plane.py"), "--role", role, "--folder", str(folder), *sizes]


def model_folder() -> Path:
    """A folder with a random Qwen3 and a byte-level BPE tokenizer, trained on this repository's texts (half a minute,
    once)."""
    if (MODEL / "tokenizer_config.json").exists():
        return MODEL
    from common import random_qwen3
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    files = [str(path) for kind in ("*.md", "*.py") for path in HERE.parent.rglob(kind) if "/.venv" not in str(path)]
    trained.train(sorted(files), vocab_size=VOCABULARY, special_tokens=["<|end|>"], show_progress=False)
    random_qwen3(MODEL, hidden=64, layers=1, vocabulary=VOCABULARY, context=2**17)
    PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>").save_pretrained(MODEL)
    return MODEL


# the orchestrator -------------------------------------------------------------------------------------


async def orchestrator(arguments: argparse.Namespace) -> dict[str, float]:
    """Run the orchestrator's parts, and measure them."""
    async with running_plane(arguments) as plane:
        steps = [await measured_step(arguments, plane, step) for step in range(arguments.steps + 1)]
    tokens = arguments.prompts * arguments.group * arguments.length
    cpu_s = statistics.fmean(step.cpu_s for step in steps[1:])  # with what the garbage collector takes now and then
    return {
        "tokens_per_cpu_s": tokens / cpu_s,
        "cpu_us_per_token": cpu_s / tokens * 1e6,
        "queue_bytes_per_token": steps[0].queue_bytes / tokens,
        "verifier_us_per_token": statistics.median(step.verifier_s for step in steps[1:]) / tokens * 1e6,
    }


@asynccontextmanager
async def running_plane(arguments: argparse.Namespace):  # noqa: ANN201
    """The orchestrator's parts, with the instance and the server for the trainer, within the block."""
    from engine.data.loader import PromptLoader
    from engine.orchestrator.plane import Plane
    from engine.orchestrator.rollout_service import rollout_service
    from engine.orchestrator.server import Server
    from engine.run.folder import RunFolder
    from engine.run.process import hold_lifeline
    from engine.run.trace import Trace
    from engine.types import Prompt
    from engine.wire.messages import Ready

    hold_lifeline()
    config = run_config(arguments)
    folder = RunFolder(arguments.folder)
    folder.logs.mkdir(parents=True)
    trace = Trace(folder.trace, "orchestrator")
    prompts = [Prompt(f"p{n}", "", "1", tuple(range(n, n + PROMPT))) for n in range(arguments.prompts)]
    loader = PromptLoader(prompts, 0, arguments.prompts)
    async with (
        rollout_service(
            config=config,
            model=model_folder(),
            folder=folder.path,
            settings=config.rollout,
            group_size=arguments.group,
            trace=trace,
            joined=True,
        ) as service,
        store_of(config, folder) as store,
    ):
        server = Server(config)
        os.environ |= server.environment  # for the replica group
        async with server.listening(folder.path):
            plane = Plane(config=config, folder=folder, trace=trace, loader=loader, service=service, **store)
            gc.freeze()  # as engine.orchestrator.opening does
            server.serve(plane)
            with process(arguments, "instance"):
                service.pool.enter("instance-0", await address(arguments.folder))
                await plane.answer(Ready(start=0, prompt_position=None, prompts=None))
                yield plane


@asynccontextmanager
async def store_of(config: Any, folder: Any):  # noqa: ANN201, ANN401
    """What the plane needs for another store than its own."""
    if config.queue.store == "orchestrator":
        yield {}
        return
    from engine.orchestrator.column_store import starting_store

    async with starting_store(config, folder.path) as starting:
        yield {"store": await starting}


def run_config(arguments: argparse.Namespace):  # noqa: ANN201
    """The configuration of the run."""
    from engine.config import Config

    other_store = {"queue": {"store": arguments.store, "unauthenticated": True}}
    return Config(
        **(other_store if arguments.store != "orchestrator" else {}),
        model={"path": str(model_folder())},
        reward={"function": "exact", "workers": 2},
        rollout={
            "instances": 0,
            "concurrency": 4,
            "group_size": arguments.group,
            "max_new_tokens": arguments.length,
            "max_context": arguments.length + PROMPT,
            "timeout_s": 600,
        },
        train={"mode": "sync", "prompts_per_step": arguments.prompts, "timeout_s": 2400},
        weights={"check_tokens": 0},  # the instance takes no weights
    )


class MeasuredStep(NamedTuple):
    """What a step took."""

    queue_bytes: int
    """Size of the full queue; 0 for all steps but the first."""
    cpu_s: float
    """CPU seconds of the orchestrator's process."""
    verifier_s: float
    """CPU seconds of the verifier processes."""


async def measured_step(arguments: argparse.Namespace, plane: Any, step: int) -> MeasuredStep:  # noqa: ANN401
    """Generate a step, then have it leased."""
    from engine.wire.messages import PutPrompts

    before = cpu_seconds()
    publishes = getattr(plane, "publishes", None) or plane._publishing  # of an older checkout
    publishes.version = step  # as if it had been published: a step has the weights of its number
    await plane.answer(PutPrompts(step=step))
    steps = getattr(plane, "steps", None)
    batch = steps.find(step) if steps is not None else plane._batches.get_batch(step)  # of an older checkout
    await batch.task
    if plane.failure is not None:
        raise plane.failure
    generated = cpu_seconds()
    size = deep_size((steps or plane.table).rows(step)) if step == 0 else 0
    sized = cpu_seconds()
    with process(arguments, "replica_group", str(step)) as leasing:
        while leasing.poll() is None:
            await asyncio.sleep(0.05)
    assert leasing.returncode == 0
    assert batch.trained == batch.expected
    (plane._end_step if steps is None else steps.end)(step)
    del batch
    after = cpu_seconds()
    cpu_s, verifier_s = (generated[at] - before[at] + after[at] - sized[at] for at in (0, 1))
    return MeasuredStep(size, cpu_s, verifier_s)


def cpu_seconds() -> tuple[float, float]:
    """CPU seconds of this process, and of the verifier processes together."""
    verifiers = 0.0
    for child in psutil.Process().children(recursive=True):
        if "engine.verifier.worker" in child.cmdline():
            times = child.cpu_times()
            verifiers += times.user + times.system
    return time.process_time(), verifiers


def deep_size(objects: Iterable[object]) -> int:
    """Bytes of the objects and of all that they refer to, each counted once; no classes, functions or modules."""
    waiting = list(objects)
    seen = set[int]()
    size = 0
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type | FunctionType | ModuleType):
            seen.add(id(one))
            size += sys.getsizeof(one)
            waiting += gc.get_referents(one)
    return size


# the processes around it --------------------------------------------------------------------------


@contextmanager
def process(arguments: argparse.Namespace, role: str, *more: str):  # noqa: ANN201
    """Run one of the processes around the orchestrator within the block."""
    child = subprocess.Popen(command(arguments, role, arguments.folder), env={**os.environ, "STEP": "".join(more)})
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def address(folder: Path, limit_s: float = 600.0) -> str:
    """The instance's address, once it has written it."""
    async with asyncio.timeout(limit_s):
        while not (folder / "instance").exists():
            await asyncio.sleep(0.05)
    return (folder / "instance").read_text()


async def instance(arguments: argparse.Namespace) -> None:
    """Answer every completion at once, with one of a few responses."""
    from aiohttp import web

    from engine.wire.rollout_messages import ROLLOUT_PROTOCOL

    replies = made_replies(arguments.length)
    if arguments.json:
        replies = {"application/json": replies["application/json"]}
    asked = 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal asked
        await request.read()
        asked += 1
        accepted = request.headers.get("Accept", "")
        kind = next((kind for kind in replies if kind in accepted), "application/json")
        return web.Response(body=replies[kind][asked % REPLIES], content_type=kind)

    async def load(request: web.Request) -> web.Response:
        return web.json_response({"running": 0, "waiting": 0, "generated_tokens": 0, "weight_version": 0})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"protocol": ROLLOUT_PROTOCOL})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/load", load), web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (arguments.folder / "partial").write_text(f"http://127.0.0.1:{runner.addresses[0][1]}")
    (arguments.folder / "partial").rename(arguments.folder / "instance")
    await asyncio.Event().wait()


def made_replies(length: int) -> dict[str, list[bytes]]:
    """Replies to /v1/completions of so many tokens, by their media type, the best first: this repository's pages as
    text, and log-probabilities in fp32."""
    import numpy as np
    from tokenizers import Tokenizer

    from engine.instance import replies

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    pages = "\n".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md")))
    ids = tokenizer.encode(pages, add_special_tokens=False).ids
    draw = random.Random(0)
    results = []
    for number in range(REPLIES):
        tokens = (ids * (1 + (number + 1) * length // len(ids)))[number * length : (number + 1) * length]
        logprobs = [float(np.float32(-draw.expovariate(3.0))) for _ in tokens]
        results.append(replies.Result(tokens, logprobs, "length", 0))
    prompt = (0, "model", [1] * PROMPT)
    made = {"application/json": [json.dumps(replies.completion_reply(*prompt, one)).encode() for one in results]}
    from engine.wire.rollout_messages import COLUMNS_TYPE

    return {COLUMNS_TYPE: [replies.completion_columns(*prompt, one) for one in results]} | made


def replica_group(arguments: argparse.Namespace) -> None:
    """Lease all windows of a step, and acknowledge them."""
    from engine.client.connection import Connection
    from engine.wire.address import ADDRESS_FILE
    from engine.wire.messages import EndOfStep, Lease

    at = (arguments.folder / ADDRESS_FILE).read_text().strip()
    older = {"ours": True} if "ours" in inspect.signature(Connection).parameters else {}  # of an older checkout
    client = Connection(f"http://{at}", os.environ["METRONOME_TOKEN"], "replica group 0", 600.0, **older)
    asked = {"replica_group": 0, "step": int(os.environ["STEP"]), "budget": 2 * arguments.group * arguments.length}
    done: tuple[int, ...] = ()
    while not isinstance(reply := client.ask(Lease(**asked, done=done)), EndOfStep):
        done = (reply.lease,) if hasattr(reply, "lease") else ()


if __name__ == "__main__":
    main()
