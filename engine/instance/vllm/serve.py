"""One rollout instance with vLLM: its OpenAI server in this process, with our middleware and worker extension.

Processes that vLLM spawns import this module first (as __mp_main__), so its imports must stay light.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import BadInput, MetronomeError
from engine.instance import command_line
from engine.instance.vllm import batch_invariance
from engine.instance.vllm.logprob_check import check_logprobs
from engine.instance.vllm.sampled_logprobs import PROCESSED
from engine.run.logs import log_error
from engine.run.process import LIFELINE, bind_cores, drop_lifeline, hold_lifeline, watch_lifeline
from engine.run.watchdogs import WATCHDOGS
from engine.types import JsonObject
from engine.wire.access_token import access_token, authorization_headers

NAP = "METRONOME_VLLM_NAP_S"
"""Environment variable for vLLM's processes on a CPU: seconds to sleep instead of each call of `os.sched_yield`; 0: no
sleep.

After each message its reader calls `os.sched_yield` in a loop (vLLM 0.32: SpinCondition.wait in
vllm/distributed/device_communicators/shm_broadcast.py) for up to a second, which takes half a core from the processes
that compute. With naps a step of the quickstart with two instances on two cores took 4.0 s, without them 8.2 (8 steps
each, one run each).
"""
HEAD_DTYPE = (0, 32)
"""The first supported vLLM release whose generating models can have an output layer of another dtype."""
NAP_LIMIT_S = 0.01
"""Longest nap in seconds. A token needs several messages, so longer naps cost more time than they save."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's environment variable for the way it starts processes."""
if __name__ == "__mp_main__":
    watch_lifeline()  # vLLM's engine and workers end with this server, even if it crashes
    if nap := os.environ.get(NAP):
        vars(os)["sched_yield"] = functools.partial(time.sleep, float(nap))

NAME = "metronome"
"""The model's name in vLLM, unless the instance takes text. Requests with token ids need not give it."""
SEEDS = 2**32
"""Seeds must be below this for numpy, which vLLM seeds as well."""
POLL_S = 0.1
WARM_UP_S = 600.0
"""Deadline of the first completion in seconds. vLLM completes its set-up with the first batch with log-probabilities,
which takes 2 to 15 s, on a busy machine minutes. The orchestrator has a separate deadline (rollout.timeout_s)."""

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it vLLM lacks the engine calls that the weight routes need
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(command_line.KEEP_ALIVE_S),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    METHOD: "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", NAP: "1e-4"}
NPU_SETTINGS = {"VLLM_ASCEND_ENABLE_NZ": "0"}  # FRACTAL_NZ weights can't be updated in place
PROFILER = {"profiler": "torch", "ignore_frontend": True, "torch_profiler_with_stack": False}
"""vLLM's profiler of its workers: torch's on a CPU and on CUDA, torch_npu's under vllm-ascend."""
INVARIANT = {"cuda": {batch_invariance.VARIABLE: "1"}, "npu": {batch_invariance.VARIABLE: "1"}}
"""Settings of a deterministic instance, by device. vLLM has no batch-invariant kernels for CPUs; release 0.32 would use
those for devices there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then return 0. Return 2 on bad input, 1 on failure."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # until vLLM sets its own handlers when it starts serving
        signal.signal(number, lambda *_: _exit_now(0))
    # ends only this process, not its group, so that Python's resource tracker can free the shared memory
    watch_lifeline(lambda: _exit_now(1))
    return command_line.run_command(options, _run)


def _run(options: argparse.Namespace) -> None:
    _check_options(options)
    command_line.ensure_token(options)
    os.environ[LIFELINE] = hold_lifeline()
    bind_cores(options.cores)
    _set_environment(options)
    _serve(options)


def _exit_now(code: int) -> None:
    """Exit at once. vLLM's processes also end, because the lifeline closes."""
    drop_lifeline()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = command_line.make_parser("engine.instance.vllm", __doc__)
    parser.add_argument("--head-dtype", choices=("model", "float32"), default="model", help="type of the logits")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "npu"), default="cpu", help="device that this vLLM was built for"
    )
    parser.add_argument("--tensor", type=int, default=1, help="devices (processes on a CPU) that share the model")
    parser.add_argument(
        "--beside-cache",
        type=int,
        default=0,
        metavar="BYTES",
        help="on a device that a trainer rank uses, too: what of gpu_memory_utilization is not for the key-value cache",
    )
    parser.add_argument("--transport", default="file", help="weights.transport of the run")
    parser.add_argument("--routes", action="store_true", help="record the experts of each token (routing replay)")
    parser.add_argument(
        "--vllm", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM (rollout.vllm)"
    )
    return parser


def _check_options(options: argparse.Namespace) -> None:
    """Raise BadInput for options that can't work."""
    _check_environment()
    command_line.check_options(options)
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(f"{sys.executable} has no vllm; run this in the environment that `make vllm` builds")


def _check_environment() -> None:
    """Raise BadInput for environment variables that can't work."""
    if (method := os.environ.get(METHOD, "spawn")) != "spawn":
        raise BadInput(f"{METHOD}={method}: must be spawn; processes that vLLM forks would not end with this server")
    nap = os.environ.get(NAP, "0")
    try:
        fits = 0 <= float(nap) <= NAP_LIMIT_S
    except ValueError:
        fits = False
    if not fits:
        raise BadInput(f"{NAP}={nap}: expected seconds between 0 (no naps) and {NAP_LIMIT_S:g}")


def _set_environment(options: argparse.Namespace) -> None:
    """Set vLLM's environment variables. A variable set by the user keeps its value."""
    by_device = {"cpu": CPU_SETTINGS, "npu": NPU_SETTINGS}.get(options.device, {})
    invariant = INVARIANT.get(options.device, {}) if options.deterministic else {}
    for key, value in {**SETTINGS, **by_device, **WATCHDOGS.get(options.transport, {}), **invariant}.items():
        os.environ.setdefault(key, value)
    if options.device != "cpu" or not float(os.environ[NAP]):
        os.environ.pop(NAP, None)
    if options.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(options.threads)


def _vllm_arguments(options: argparse.Namespace, port: int) -> list[str]:
    """Return the command line of vLLM's server."""
    pairs = {
        "--model": options.model,
        "--served-model-name": options.text or NAME,
        "--host": options.host,
        "--port": str(port),
        "--dtype": options.dtype,
        "--max-model-len": str(options.max_context),
        "--max-num-seqs": str(options.slots),
        # vLLM's default is 0, with which all instances would sample the same responses to requests without a seed
        "--seed": str(secrets.randbelow(SEEDS)),
        "--tensor-parallel-size": str(options.tensor),
        "--logprobs-mode": PROCESSED,
        "--generation-config": "vllm",  # not the model folder's, which may change the sampling
        "--worker-extension-cls": "engine.instance.vllm.worker_entry.WorkerExtension",
        "--middleware": "engine.instance.vllm.middleware.Middleware",
        "--allowed-origins": "[]",
    }
    flags = [
        *([] if options.text else ["--skip-tokenizer-init"]),
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
        *(["--enable-return-routed-experts"] if options.routes else []),
    ]
    if options.device == "cpu":
        pairs["--block-size"] = "32"  # the CPU's default of 128 lets few prompts share their cache
        flags.append("--enforce-eager")
    own = [part for pair in pairs.items() for part in pair] + flags
    theirs = dict(options.vllm)
    if options.head_dtype != "model":
        _check_head()
        theirs["hf_overrides"] = {**theirs.get("hf_overrides", {}), "head_dtype": options.head_dtype}
    if options.beside_cache:  # vLLM would count as its own what the trainer allocates while it measures
        from vllm.platforms import current_platform

        share = theirs["gpu_memory_utilization"] * current_platform.get_device_total_memory()
        theirs.setdefault("kv_cache_memory_bytes", int(share) - options.beside_cache)
    if options.profile is not None:
        theirs.setdefault("profiler_config", {**PROFILER, "torch_profiler_dir": str(options.profile / options.name)})
    return [*own, *(part for name, value in theirs.items() for part in _as_vllm_takes(_flag(name), value))]


def _check_head() -> None:
    """Raise BadInput if this vLLM does not support an output layer with another dtype than the model's."""
    from vllm import __version__

    release = re.match(r"(\d+)\.(\d+)", __version__)  # a build from source may have another form
    if release is not None and (int(release[1]), int(release[2])) < HEAD_DTYPE:
        needed = ".".join(map(str, HEAD_DTYPE))
        raise BadInput(f'model.head_dtype = "float32" needs vLLM {needed} or newer; instances have {__version__}')


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _as_vllm_takes(flag: str, value: Any) -> list[str]:  # noqa: ANN401
    """Return the parts of vLLM's command line that set an argument. If an argument is set twice, the last setting
    counts."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(_as_text, value)]
    return [f"{flag}={_as_text(value)}"]


def _as_text(value: Any) -> str:  # noqa: ANN401
    return value if isinstance(value, str) else json.dumps(value)


def _serve(options: argparse.Namespace) -> None:
    """Run vLLM's server on a socket that we bind, so that no other process can take the free port in the meantime."""
    with command_line.bind_socket(options) as sock:
        port = sock.getsockname()[1]
        arguments = _parse_as_vllm(_vllm_arguments(options, port), options.vllm)
        if options.text:
            options.turn_ends = _read_turn_ends(options.model, arguments)
        import uvloop
        from vllm.entrypoints.openai.api_server import run_server_worker

        from engine.instance.vllm.middleware import Middleware

        Middleware.options = options
        url = f"http://{'127.0.0.1' if options.host == '0.0.0.0' else options.host}:{port}"
        threading.Thread(target=_announce, args=(options, url, port), name="announce", daemon=True).start()
        uvloop.run(run_server_worker(url, sock, arguments))


def _parse_as_vllm(arguments: list[str], given: JsonObject) -> Any:  # noqa: ANN401
    """Return the options as vLLM parses them. Raise BadInput if it rejects one, with its key in `given`
    (rollout.vllm)."""
    # the module that defines both functions moved after 0.23; the command `vllm serve` imports them in every release
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))  # an abbreviated name would bypass our checks
    parser.error = functools.partial(_refuse_arguments, given)  # argparse would print its usage and exit
    try:
        parsed = parser.parse_args(arguments)
        validate_parsed_serve_args(parsed)
    except (TypeError, ValueError) as error:
        _refuse_arguments(given, str(error))
    return parsed


def _read_turn_ends(model: str, arguments: Any) -> list[int]:  # noqa: ANN401
    """Return the tokens that end a turn in the chat template. Raise BadInput if vLLM, with these options, reads text
    otherwise than the model's tokenizer.json."""
    from vllm.tokenizers import get_tokenizer

    from engine.data.tokenizer import Tokenizer

    theirs = get_tokenizer(arguments.tokenizer or model, tokenizer_mode=arguments.tokenizer_mode)
    read = functools.partial(theirs.encode, add_special_tokens=False)
    ours = Tokenizer(Path(model))
    if difference := ours.compare(read, "vLLM"):
        raise BadInput(
            f"--model {model}: {difference}. Serve this model with the embedded engine, or set tokenizer_class in "
            'tokenizer_config.json to "PreTrainedTokenizerFast" if that changes it'
        )
    return ours.turn_ends


def _refuse_arguments(given: JsonObject, message: str) -> NoReturn:
    from vllm import __version__

    keys = [f"rollout.vllm.{name}" for name in given if re.search(rf"--(no-)?{_flag(name)[2:]}(?![\w-])", message)]
    raise BadInput(f"{', '.join(keys) or 'rollout.vllm'}: vLLM {__version__} does not take this: {message}")


def _announce(options: argparse.Namespace, url: str, port: int) -> None:
    """Wait until the server answers. Check its log-probabilities, so that no other request pays for first-time set-up,
    probe a deterministic instance, and write the port file."""
    try:
        while not _answers(url + "/health"):
            time.sleep(POLL_S)
        ask = functools.partial(_ask, url)
        check_logprobs(ask, _platform(options))
        if options.deterministic:
            batch_invariance.check_invariance(ask, options.slots, options.max_context, _platform(options))
    except OSError as error:  # HTTP errors are OSErrors as well
        detail = error.read().decode(errors="replace")[:500] if isinstance(error, urllib.error.HTTPError) else ""
        log_error(f"{options.name}: the first completion failed: {error} {detail}")
        _exit_now(1)
    except MetronomeError as error:
        log_error(f"{options.name}: {error}")
        _exit_now(command_line.exit_code(error))
    command_line.announce_address(options, port)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _platform(options: argparse.Namespace) -> str:
    """Return vLLM's release and device, for messages."""
    from vllm import __version__

    setting = os.environ.get(batch_invariance.VARIABLE)
    return f"vLLM {__version__} on {options.device} ({batch_invariance.VARIABLE} is {setting or 'not set'})"


def _ask(url: str, method: str, path: str, body: JsonObject) -> JsonObject:
    headers = {"Content-Type": "application/json", **authorization_headers(access_token())}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=WARM_UP_S) as reply:
        answer: JsonObject = json.loads(reply.read())
    return answer


if __name__ == "__main__":
    sys.exit(main())
