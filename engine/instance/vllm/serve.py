"""One rollout instance with vLLM: its OpenAI server in this process, with our middleware and worker extension.

Spawned processes of vLLM import this module, too (as __mp_main__), before anything else: keep its imports light.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import BadInput, MetronomeError
from engine.run.process import LIFELINE, bind, drop_lifeline, hold_lifeline, watch_lifeline
from engine.wire.access_token import access_token, authorization, check_address

NAP = "METRONOME_VLLM_NAP_S"
"""Environment variable for vLLM's processes on a CPU: seconds that they sleep where vLLM gives up a turn while it
waits; 0: none.

Each message keeps whoever reads them in a loop of `os.sched_yield` (vLLM 0.32: SpinCondition.wait in
vllm/distributed/device_communicators/shm_broadcast.py) for up to a second, which takes half of a core from whoever
computes. With naps a step of the quickstart with two instances on two cores took 4.0 s, without them 8.2 (8 steps each,
one run each).
"""
NAP_LIMIT_S = 0.01
"""A token costs several messages: longer naps cost more than they give."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's: how it starts processes."""
if __name__ == "__mp_main__":
    watch_lifeline()  # vLLM's engine and workers end with this server, however it ends
    if nap := os.environ.get(NAP):
        vars(os)["sched_yield"] = functools.partial(time.sleep, float(nap))

NAME = "metronome"
"""The model's name in vLLM; requests need not say it."""
POLL_S = 0.1
WARM_UP_S = 600.0
"""Deadline of the first completion: vLLM takes 2 to 15 s for what it leaves to the first batch with log-probabilities,
on a busy machine minutes. Whoever started it has a deadline of its own (rollout.timeout_s)."""

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it the weight routes' engine calls do not exist
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    METHOD: "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CPU_SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", NAP: "1e-4"}
NPU_SETTINGS = {"VLLM_ASCEND_ENABLE_NZ": "0"}  # FRACTAL_NZ weights can't be updated in place


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Exit code 0 then, 2 on bad input, 1 on failure."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):  # until vLLM's own handlers take over, when it serves
        signal.signal(number, lambda *_: _leave(0))
    # not the whole group at once: Python's resource tracker then frees the shared memory
    watch_lifeline(lambda: _leave(1))
    try:
        token = _check(options)
        os.environ[LIFELINE] = hold_lifeline()
        bind(options.cores)
        _set_environment(options)
        _serve(options, token)
    except MetronomeError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    return 0


def _leave(code: int) -> None:
    """End at once; vLLM's processes follow when the lifeline closes."""
    drop_lifeline()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.instance.vllm", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument(
        "--host", default="127.0.0.1", help="IP address to listen on; off loopback METRONOME_TOKEN must be set"
    )
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="where to write host, port and pid, as JSON, when ready")
    parser.add_argument("--name", default="instance-0", help="name of this instance in messages")
    parser.add_argument("--slots", type=int, default=32, help="responses decoded at the same time")
    parser.add_argument("--max-context", type=int, default=2048, help="prompt and response tokens together")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu", help="what this vLLM was built for")
    parser.add_argument("--tensor", type=int, default=1, help="devices (processes on a CPU) that share the model")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each process on a CPU")
    parser.add_argument("--cores", type=_cores, default=[], help="comma-separated CPU cores to stay on")
    parser.add_argument("--transport", default="file", help="weights.transport of the run")
    return parser


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]


def _check(options: argparse.Namespace) -> str | None:
    """The token; BadInput for options that cannot work."""
    token = access_token()
    check_address(options.host, token)
    _check_environment()
    if not (Path(options.model) / "config.json").is_file():
        raise BadInput(f"--model {options.model}: there is no config.json; expected a Hugging Face folder")
    for key, least in (("slots", 1), ("threads", 1), ("tensor", 1), ("max_context", 2), ("port", 0)):
        if getattr(options, key) < least:
            raise BadInput(f"--{key.replace('_', '-')} {getattr(options, key)}: must be at least {least}")
    if options.port_file is not None and not options.port_file.parent.is_dir():
        raise BadInput(f"--port-file {options.port_file}: there is no folder {options.port_file.parent}")
    if options.transport == "hccl" and options.device != "npu":
        raise BadInput(f"--transport hccl needs --device npu, not {options.device}")
    if importlib.util.find_spec("vllm") is None:
        raise BadInput(f"{sys.executable} has no vllm; run this in the environment that `make vllm` builds")
    return token


def _check_environment() -> None:
    """BadInput for variables of the user's that cannot work."""
    if (method := os.environ.get(METHOD, "spawn")) != "spawn":
        raise BadInput(f"{METHOD}={method}: must be spawn; what vLLM forks would not end with this server")
    nap = os.environ.get(NAP, "0")
    try:
        fits = 0 <= float(nap) <= NAP_LIMIT_S
    except ValueError:
        fits = False
    if not fits:
        raise BadInput(f"{NAP}={nap}: expected seconds between 0 (no naps) and {NAP_LIMIT_S:g}")


def _set_environment(options: argparse.Namespace) -> None:
    """vLLM's settings that are not arguments; what the user set stays."""
    by_device = {"cpu": CPU_SETTINGS, "npu": NPU_SETTINGS}.get(options.device, {})
    for key, value in {**SETTINGS, **by_device}.items():
        os.environ.setdefault(key, value)
    if options.device != "cpu" or not float(os.environ[NAP]):
        os.environ.pop(NAP, None)
    if options.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(options.threads)


def _vllm_arguments(options: argparse.Namespace, port: int) -> list[str]:
    """The command line of vLLM's server."""
    pairs = {
        "--model": options.model,
        "--served-model-name": NAME,
        "--host": options.host,
        "--port": str(port),
        "--dtype": options.dtype,
        "--max-model-len": str(options.max_context),
        "--max-num-seqs": str(options.slots),
        "--tensor-parallel-size": str(options.tensor),
        "--logprobs-mode": "processed_logprobs",  # of what is sampled from: after the temperature
        "--generation-config": "vllm",  # not the model folder's, which may change sampling behind our back
        "--worker-extension-cls": "engine.instance.vllm.worker_entry.WorkerExtension",
        "--middleware": "engine.instance.vllm.middleware.Middleware",
        "--allowed-origins": "[]",
    }
    flags = [
        "--skip-tokenizer-init",
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    ]
    if options.device == "cpu":
        pairs["--block-size"] = "32"  # the CPU's default of 128 lets few prompts share their cache
        flags.append("--enforce-eager")
    if options.transport == "hccl":
        pairs["--weight-transfer-config"] = json.dumps({"backend": "hccl"})
    return [part for pair in pairs.items() for part in pair] + flags


def _serve(options: argparse.Namespace, token: str | None) -> None:
    """vLLM's server on a socket of ours, so that a free port can't be taken by somebody else meanwhile."""
    with _listening(options) as sock:
        port = sock.getsockname()[1]
        arguments = _parse(_vllm_arguments(options, port))
        import uvloop
        from vllm.entrypoints.openai.api_server import run_server_worker

        url = f"http://{'127.0.0.1' if options.host == '0.0.0.0' else options.host}:{port}"
        threading.Thread(target=_announce, args=(options, url, port, token), name="announce", daemon=True).start()
        uvloop.run(run_server_worker(url, sock, arguments))


def _listening(options: argparse.Namespace) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        raise BadInput(f"--host {options.host} --port {options.port}: {error.strerror}") from None
    return sock


def _parse(arguments: list[str]) -> Any:  # noqa: ANN401
    """vLLM's namespace. Its parser moved after 0.23, the release that vllm-ascend goes with."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    places = ("vllm.entrypoints.launchers", "vllm.entrypoints.openai")
    place = next(place for place in places if importlib.util.find_spec(f"{place}.cli_args"))
    cli = importlib.import_module(f"{place}.cli_args")
    parsed = cli.make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    cli.validate_parsed_serve_args(parsed)
    return parsed


def _announce(options: argparse.Namespace, url: str, port: int, token: str | None) -> None:
    """Once it serves: one completion, so that no request pays for first-time set-up, then the port file."""
    try:
        while not _answers(url + "/health"):
            time.sleep(POLL_S)
        body = {"prompt": [0, 0], "max_tokens": 2, "prompt_logprobs": 0, "ignore_eos": True}
        _post(url + "/v1/completions", body, token)
    except OSError as error:  # HTTP errors are OSErrors, too
        detail = error.read().decode(errors="replace")[:500] if isinstance(error, urllib.error.HTTPError) else ""
        print(f"{options.name}: the first completion failed: {error} {detail}", file=sys.stderr, flush=True)
        _leave(1)
    print(f"{options.name}: serving {options.model} on {url}", flush=True)
    if options.port_file is not None:
        partial = options.port_file.with_name(options.port_file.name + ".partial")
        partial.write_text(json.dumps({"host": options.host, "port": port, "pid": os.getpid()}))
        partial.replace(options.port_file)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _post(url: str, body: dict[str, Any], token: str | None) -> None:
    headers = {"Content-Type": "application/json", **authorization(token)}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WARM_UP_S):
        pass


if __name__ == "__main__":
    sys.exit(main())
