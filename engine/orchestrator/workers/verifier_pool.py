"""Runs verifiers in separate processes, so that a verifier that hangs, crashes or leaks memory can be killed. A
verifier is a user's code, so its environment has no token and no key of the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from engine.config import OnFault, Reward
from engine.errors import BadInput, DeadlineError, ProcessDied, RewardError
from engine.reward.verifiers import BUILT_IN
from engine.run.commands import verifier_command
from engine.run.process import Child
from engine.types import Prompt, Response, Score
from engine.wire import verifier_messages
from engine.wire.columns import PackedResponse
from engine.wire.messages import PROTOCOL
from engine.wire.verifier_messages import (
    HEADER,
    MOST_ANSWER,
    TOO_MANY_PROCESSES,
    LoadTokenizer,
    RewardFailed,
    RewardLoaded,
    RewardRefused,
    ScoreCall,
    Scores,
    VerifierMessage,
    WeightedFunction,
)

PASSED = frozenset(
    " ".join(
        (
            "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM NO_COLOR VIRTUAL_ENV CONDA_PREFIX",
            "LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH TOKENIZERS_PARALLELISM",
            "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
            "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE XDG_CACHE_HOME",
            "CUDA_HOME CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES",
            "ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH PREFECT__FLOW_RUN_ID",
        )
    ).split()
)
"""Variables that a verifier process gets: where programs, libraries and caches are, and which devices it may use.
PREFECT__FLOW_RUN_ID says which flow run a process belongs to."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")
"""Prefixes of the names of further variables that are passed on."""


def verifier_environment(named: Iterable[str]) -> dict[str, str]:
    """Return the variables of this process's environment that a verifier process gets. `named`: reward.environment."""
    wanted = PASSED | set(named)
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(PASSED_PREFIXES)}


END_S = 6.0 if sys.platform == "linux" else 0.0
"""Seconds that a worker's guardian gets to end what the worker has started (engine.verifier.guardian). It usually takes
some hundredths of a second."""
MOST_PROCESSES = 256
"""Most processes that one verifier's reward may have started at once: a pool of one for each core, and more. If there
are more, all of them end and the call fails."""
START_S = 120.0
"""Seconds in which a process must have loaded the reward or the program."""
DEATHS = 3
"""Number of processes that may die of the same call before the response is blamed, or be killed while loading the
reward."""


REWARD_KEY = "reward.function"

NO_TOKENIZER = LoadTokenizer()
"""Used if each response to be scored comes with its text."""

TICK_S = 0.5
"""The longest interval in seconds that counts towards a time limit between two looks at the clock. So nothing times out
because the orchestrator was suspended."""

Result = TypeVar("Result")


class WorkerDied(RewardError):
    """A verifier process ended before it answered, or wrote something else; the message says how."""

    is_last = False
    """Whether what ended it would end the next one too."""


class VerifierPool:
    """Scores responses in `workers` processes, one call at a time in each. Bound to the event loop that calls `start`.

    Use it as `async with VerifierPool(...) as pool`, or call `start` and `close`.
    """

    def __init__(self, reward: Reward, log: Path | None = None, program: str = "") -> None:
        """`log`: file for what the reward prints; None: this process's stderr. `program`: a rollout program, whose
        loading is tried in place of the reward's."""
        self._reward = reward
        self._functions = (
            [WeightedFunction(program, program=True)]
            if program
            else [WeightedFunction(one.function, one.weight, one.name) for one in reward.named]
        )
        self._built_in = all(one.function in BUILT_IN for one in self._functions)
        self._workers = [
            VerifierProcess(f"verifier {index}", self._functions, reward, log) for index in range(reward.workers)
        ]
        self._idle: asyncio.Queue[VerifierProcess] = asyncio.Queue()

    async def start(self, tokenizer: LoadTokenizer = NO_TOKENIZER) -> None:
        """Start all workers and wait until each has loaded the reward. `tokenizer` decodes responses.

        Raises BadInput if the reward can't be loaded, DeadlineError if loading takes longer than START_S.
        """
        try:
            for worker in self._workers:
                worker.launch(tokenizer)
            for worker in self._workers:
                await worker.ready()
                self._idle.put_nowait(worker)
        finally:
            if self._idle.qsize() < len(self._workers):
                self.close()

    @property
    def per_response(self) -> bool:
        """Whether the reward takes one response per call, instead of a whole group; known after `start`."""
        return self._workers[0].per_response

    async def score(self, prompt: Prompt, responses: Sequence[Response | PackedResponse]) -> list[Score]:
        """Return one score for each response, in order. A group reward needs the whole group in one call.

        After a call that takes longer than reward.timeout_s, the responses score 0 with status "timeout". If the reward
        raises, returns something other than a number, or ends its process DEATHS times, they score 0 with status
        "error". With "exclude", these scores are also marked as excluded. With "stop", RewardError is raised instead,
        except for errors of a built-in reward.
        """
        if not self.per_response:
            return await self._score_call(prompt, responses)
        return [score for response in responses for score in await self._score_call(prompt, [response])]

    def close(self) -> None:
        """Kill all workers and the processes that they started. Calls in progress and later calls raise ProcessDied."""
        for worker in self._workers:
            worker.close()

    async def __aenter__(self) -> VerifierPool:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _score_call(self, prompt: Prompt, responses: Sequence[Response | PackedResponse]) -> list[Score]:
        call = verifier_messages.make_score_call(prompt, responses, text_only=self._built_in)
        try:
            return await self._ask_until_answered(call)
        except TimeoutError:
            score = self._failed(
                "timeout", self._reward.on_timeout, prompt, f"no score within {self._reward.timeout_s:g} s"
            )
        except RewardError as error:
            score = self._failed("error", self._reward.on_error, prompt, str(error))
        return [score] * len(responses)

    def _failed(self, status: str, choice: OnFault, prompt: Prompt, why: str) -> Score:
        what = f"reward.function{_shown(self._functions).removeprefix(REWARD_KEY)}, prompt {prompt.id}: {why}"
        if choice == "stop" and not (status == "error" and self._built_in):  # only a response makes it fail
            raise RewardError(what)
        return Score(0.0, status, what, excluded=choice == "exclude")

    async def _ask_until_answered(self, call: ScoreCall) -> list[Score]:
        """Ask idle workers one after the other until one survives, at most DEATHS times."""
        deaths = 0
        while True:
            # This wait needs no deadline: every call ahead of this one ends within its limit, and so does each restart.
            worker = await self._idle.get()
            try:
                return await worker.ask(call, self._reward.timeout_s)
            except WorkerDied as error:
                if error.is_last:
                    raise
                deaths += 1
                if deaths == DEATHS:
                    raise RewardError(f"{DEATHS} processes died of it; last error: {error}") from None
            finally:
                self._idle.put_nowait(worker)


class VerifierProcess:
    """One verifier process and the connection to it. A call that times out or breaks replaces the process."""

    def __init__(self, name: str, functions: Sequence[WeightedFunction], reward: Reward, log: Path | None) -> None:
        """`reward`: says what the process may see and use. `log`: as for `VerifierPool`."""
        self.per_response = False
        self._environment = verifier_environment(reward.environment)
        self._memory = int(reward.memory_gb * 2**30)
        self._child: Child | None = None
        self._name = name
        self._functions = functions
        self._log = log
        self._closed = False
        self._calls = 0
        """Number of calls so far."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loading: asyncio.Task[None] | None = None
        self._tokenizer = NO_TOKENIZER

    def launch(self, tokenizer: LoadTokenizer) -> None:
        """Start the process; `ready` waits until it takes calls. Each one that replaces it gets the same tokenizer."""
        self._tokenizer = tokenizer
        self._start_loading()

    def _start_loading(self) -> None:
        """Nothing is awaited here, so that `close` can't run in between."""
        self._loading = asyncio.create_task(self._load(self._start_process()))
        # `ready` raises the error. Retrieving it here too keeps asyncio from warning if `ready` is not called again.
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ready(self) -> None:
        """Wait until the process has loaded the reward.

        Every call raises BadInput or DeadlineError if loading failed, and ProcessDied if the pool was closed.
        """
        assert self._loading is not None, "`launch` comes first"
        await asyncio.shield(self._loading)

    async def ask(self, call: ScoreCall, timeout_s: float) -> list[Score]:
        """Send a call and return its scores, one for each response.

        Raises TimeoutError after `timeout_s`, RewardError if the reward fails, WorkerDied if the process ends or
        answers with something else, ProcessDied if the pool was closed, and what `ready` raises.
        """
        self._check_open()
        await self.ready()
        self._calls += 1
        call = msgspec.structs.replace(call, number=self._calls)
        answer = None
        try:
            self.send(call)
            answer = _checked_answer(call, await AwakeTimer(timeout_s).wait(self.receive()))
        finally:
            if answer is None:
                # It timed out, died or was cancelled: a late answer would be mistaken for the answer to the next call.
                self.restart()
        if isinstance(answer, RewardFailed):
            raise RewardError(answer.message)
        return answer

    def send(self, message: VerifierMessage) -> None:
        """Send a message to the process, which `ready` has awaited. One that has ended gets nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(verifier_messages.frame_message(message))

    async def receive(self) -> VerifierMessage:
        """Return the process's next message.

        Raises WorkerDied if the process ends or sends something else, ProcessDied if it was closed.
        """
        assert self._reader is not None, "`ready` comes first"
        try:
            size = verifier_messages.body_size(await self._reader.readexactly(HEADER.size))
            if size > MOST_ANSWER:
                raise ValueError(f"a message of {size:,} bytes")
            return verifier_messages.read_message(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._check_open()
            raise self._how_it_died() from None
        except ValueError as error:
            raise _wrong_message(error) from None

    def restart(self) -> None:
        """Kill the process and start another in its place, unless it was closed."""
        if not self._closed:
            self._kill()
            self._start_loading()

    def close(self) -> None:
        """Kill the process and start no new one."""
        self._closed = True
        self._kill()

    def _start_process(self) -> socket.socket:
        """Start a process. Return our end of the connection to it."""
        ours, theirs = socket.socketpair()
        try:
            self._child = Child(
                name=self._name,
                arguments=verifier_command(
                    connection=theirs.fileno(),
                    memory=self._memory,
                    processes=MOST_PROCESSES,
                    functions=verifier_messages.pack_functions(self._functions),
                ),
                log=self._log,
                pass_fds=(theirs.fileno(),),
                inherited=self._environment,
            )
        finally:
            theirs.close()
        self._writer = None
        return ours

    async def _load(self, connection: socket.socket) -> None:
        """Wait until the process has loaded the reward. If it is killed while loading, it is restarted."""
        deaths = 0
        while True:
            try:
                return await self._wait_until_loaded(connection)
            except WorkerDied as error:
                deaths += 1
                if self._child is None or not self._child.was_killed or deaths == DEATHS:
                    raise BadInput(f"{_shown(self._functions)}: while loading it, {error}") from None
            self._kill()
            connection = self._start_process()

    async def _wait_until_loaded(self, connection: socket.socket) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=connection)
        try:
            async with asyncio.timeout(START_S):
                self.send(self._tokenizer)
                hello = await self.receive()
        except TimeoutError:
            raise DeadlineError(
                f"{self._name}: {_shown(self._functions)} was not loaded within {START_S:g} s"
            ) from None
        if isinstance(hello, RewardRefused):
            raise BadInput(hello.message)
        if not isinstance(hello, RewardLoaded):
            raise _wrong_message(f"it sent {type(hello).__name__}")
        if hello.protocol != PROTOCOL:
            raise BadInput(
                f"{self._name} speaks version {hello.protocol} of the verifiers' protocol, the orchestrator version "
                f"{PROTOCOL}: both must come from the same release of Metronome"
            )
        self.per_response = hello.per_response

    def _kill(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            if self._writer is not None:
                self._writer.close()
            child.stop(END_S)  # its guardian ends the worker and what that has started

    def _check_open(self) -> None:
        if self._closed:
            raise ProcessDied(f"{self._name} was closed with its pool before the response was scored")

    def _how_it_died(self) -> WorkerDied:
        """Say how the process ended. Its connection is closed, so it has ended or will within moments."""
        assert self._child is not None, "`receive` calls this while there is a process"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(max(1.0, END_S))
        if self._child.process.poll() != TOO_MANY_PROCESSES:
            return WorkerDied(f"its process {self._child.how_it_ended()}")
        died = WorkerDied(
            f"its process was ended with all that it had started: they were more than {MOST_PROCESSES} at once"
        )
        died.is_last = True
        return died


def _wrong_message(what: object) -> WorkerDied:
    return WorkerDied(f"its process wrote something other than its answers to the orchestrator's socket: {what!s:.200}")


def _checked_answer(call: ScoreCall, answer: VerifierMessage) -> RewardFailed | list[Score]:
    """Return the answer to a call. Raises WorkerDied if it is no answer, or the answer to another call."""
    if not isinstance(answer, Scores | RewardFailed) or answer.number != call.number:
        raise _wrong_message(f"{type(answer).__name__} is not the answer to call {call.number}")
    if isinstance(answer, RewardFailed):
        return answer
    if len(answer.scores) != len(call.responses):
        raise _wrong_message(f"{len(answer.scores)} scores for {len(call.responses)} responses")
    return answer.opened()


def _shown(functions: Sequence[WeightedFunction]) -> str:
    """Return the key and its value for messages, or the names of reward.functions."""
    if functions[0].name:
        return f"reward.functions = {', '.join(one.name for one in functions)}"
    return f'{"rollout.program" if functions[0].program else "reward.function"} = "{functions[0].function}"'


class AwakeTimer:
    """Time for work, not counting time when this process was suspended."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s

    async def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. Raises TimeoutError, and cancels it, once no time is left."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self.left_s <= 0:
                    raise TimeoutError
                began = time.monotonic()
                await asyncio.wait((task,), timeout=min(self.left_s, TICK_S))
                self.left_s -= min(time.monotonic() - began, TICK_S)
            return task.result()
        finally:
            task.cancel()
