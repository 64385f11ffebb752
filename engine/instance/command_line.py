"""The part of the command line shared by both engines: arguments, checks, the socket, the port file.

It imports only the standard library and light parts of the engine, because processes that vLLM spawns import it first.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path

from engine.errors import BadInput, MetronomeError
from engine.run.disk import raise_limit
from engine.run.logs import log_error, log_line
from engine.run.process import BAD_INPUT
from engine.wire.access_token import VARIABLE, access_token, authorization_headers, check_address, own_token
from engine.wire.address import bracket_host

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept open. The orchestrator keeps it for less (aiohttp: 15), so that the instance
does not close a connection while the orchestrator is sending."""
LEAST = {"slots": 1, "threads": 1, "tensor": 1, "max_context": 2, "port": 0, "open_requests": 1, "read_timeout": 1}
"""Smallest value of each option."""


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every instance takes."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument("--model", required=True, help="Hugging Face folder")
    made.add_argument(
        "--host", default="127.0.0.1", help="IP address to listen on; one that is not loopback needs METRONOME_TOKEN"
    )
    made.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    made.add_argument("--port-file", type=Path, help="where to write host, port and pid, as JSON, when ready")
    made.add_argument("--name", default="instance-0", help="name of this instance in messages")
    made.add_argument("--slots", type=int, default=32, help="responses decoded at the same time")
    made.add_argument("--max-context", type=int, default=2048, help="prompt and response tokens together")
    made.add_argument("--threads", type=int, default=1, help="compute threads of each process on a CPU")
    made.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights (model.dtype)"
    )
    made.add_argument("--cores", type=_cores, default=[], help="comma-separated CPU cores to run on")
    made.add_argument(
        "--deterministic", action="store_true", help="make a response depend on prompt, seed and weights only"
    )
    made.add_argument(
        "--open-requests",
        type=int,
        default=4096,
        help="most completions waiting or running at once; further ones are answered 429",
    )
    made.add_argument(
        "--text",
        default="",
        metavar="NAME",
        help="also serve text through OpenAI's API, under this model name; needs the model's tokenizer",
    )
    made.add_argument("--policy-version", type=int, default=0, help="updates of this policy, for people who ask")
    made.add_argument("--profile", type=Path, help="folder for profiles (POST /start_profile)")
    made.add_argument(
        "--read-timeout", type=float, default=60.0, help="seconds a client may take to send a request's body"
    )
    made.set_defaults(made_token=False)
    return made


def _cores(text: str) -> list[int]:
    return [int(core) for core in text.split(",")]


def check_options(options: argparse.Namespace) -> None:
    """Raise BadInput for options that can't work."""
    check_address(options.host, access_token())
    if not (Path(options.model) / "config.json").is_file():
        raise BadInput(f"--model {options.model}: there is no config.json; expected a Hugging Face folder")
    for key, given in vars(options).items():
        if key in LEAST and given < LEAST[key]:
            raise BadInput(f"--{key.replace('_', '-')} {given}: must be at least {LEAST[key]}")
    if options.port_file is not None and not options.port_file.parent.is_dir():
        raise BadInput(f"--port-file {options.port_file}: there is no folder {options.port_file.parent}")
    missing = set(options.cores) - os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if missing:
        raise BadInput(f"--cores: this process may not use {sorted(missing)}, only {sorted(os.sched_getaffinity(0))}")


def ensure_token(options: argparse.Namespace) -> None:
    """Make an access token for this process unless its environment has one. `announce_address` prints a new one."""
    options.made_token = access_token() is None
    os.environ[VARIABLE] = own_token()


def run_command(options: argparse.Namespace, work: Callable[[argparse.Namespace], None]) -> int:
    """Call `work` and return the exit code: 0 on success, 2 on bad input, 1 on failure. Print an error to stderr."""
    raise_limit()
    try:
        work(options)
    except MetronomeError as error:
        log_error(f"{options.name}: {error}")
        return exit_code(error)
    return 0


def exit_code(error: MetronomeError) -> int:
    """Return the exit code of an instance that ends with this error."""
    return BAD_INPUT if isinstance(error, BadInput) else 1


def bind_socket(options: argparse.Namespace) -> socket.socket:
    """Return a socket bound to --host and --port. Raise BadInput if it can't be bound."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # name the protocol: only then asyncio sets TCP_NODELAY; without it each part of a reply waits 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        sock.close()
        what = "; give another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        raise BadInput(f"--host {options.host} --port {options.port}: {error.strerror}{what}") from None
    return sock


def announce_address(options: argparse.Namespace, port: int) -> None:
    """Print the address that the instance serves at, and write the port file atomically."""
    url = f"http://{bracket_host(options.host)}:{port}"
    log_line(f"{options.name}: serving {options.model} on {url}")
    if options.text:
        log_line(f"{options.name}: OpenAI's API is at {url}/v1, with the model {options.text!r}")
    if options.made_token:
        (header,) = (f"{name}: {value}" for name, value in authorization_headers(access_token()).items())
        print(f"{options.name}: try it: curl -H {shlex.quote(header)} {url}/", flush=True)
    if options.port_file is not None:
        partial = options.port_file.with_name(options.port_file.name + ".partial")
        partial.write_text(json.dumps({"host": options.host, "port": port, "pid": os.getpid()}))
        partial.replace(options.port_file)
