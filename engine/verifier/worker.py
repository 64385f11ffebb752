"""The verifier process: loads the reward, then scores one call after the other until the orchestrator closes the
socket.

`engine.orchestrator.workers.verifier_pool` starts it with the command
`python -m engine.verifier.worker SOCKET MEMORY PROCESSES FUNCTIONS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import resource
import socket
import sys
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from engine.data.tokenizer import TokenizerFile
from engine.errors import BadInput, RewardError, cut_text
from engine.reward.scorer import LARGEST_SCORE, METRIC_NAME, METRIC_NAMES
from engine.reward.verifiers import BUILT_IN
from engine.run.process import watch_lifeline
from engine.run.user_code import UserCode, describe_error, load_copies
from engine.types import Prompt, Response, Score
from engine.verifier.guardian import start_guardian
from engine.verifier.program import load_program, serve_episodes
from engine.verifier.reward_function import RewardFunction, check_built_in, load_rewards
from engine.wire import verifier_messages
from engine.wire.columns import Decode
from engine.wire.verifier_messages import (
    HEADER,
    MOST_ANSWER,
    LoadTokenizer,
    RewardFailed,
    RewardLoaded,
    RewardRefused,
    ScoreCall,
    Scores,
    VerifierMessage,
    WeightedFunction,
)

MEMORY = 512 * 2**20
"""Limit in bytes of the address space that the built-in verifiers take after they are loaded, so that a response such
as 9^{9^{9}} can't use up the host's memory."""

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest finite number in fp32."""
_EXPECTED_SCORE = f"a number from {-LARGEST_SCORE:,.0f} to {LARGEST_SCORE:,.0f}"
LONGEST_STATUS = 100
"""Length in characters after which a score's status is cut."""
SCORE_KEYS = ("score", "reward")
"""Keys of a dict under one of which a reward returns the score."""
NO_LISTS = (str, bytes, bytearray, Mapping, Set)
"""Iterable types that are not a list of scores: texts, and types without order or without scores."""


def main(socket_fd: int, memory: int, processes: int, functions: Sequence[WeightedFunction]) -> None:
    """Answer the orchestrator at the other end of `socket_fd` until it closes the socket. `memory`: limit in bytes for
    a user's reward. `processes`: limit on the processes that a reward starts. 0 means no limit."""
    start_guardian(socket_fd, processes)
    watch_lifeline()
    _print_to_stderr()
    with socket.socket(fileno=socket_fd) as connection:
        orchestrator = _Orchestrator(connection)
        message = orchestrator.receive()
        if not isinstance(message, LoadTokenizer):
            return  # the orchestrator has ended the run
        try:
            before = MemoryUse.now()
            decode = TokenizerFile(message).decode
            took = MemoryUse.now().since(before) if message.json else MemoryUse(0, 0)
            built_in = all(one.function in BUILT_IN for one in functions)
            if not built_in:
                limit_memory(False, memory, took)
            load_copies(Path(message.code) if message.code else None)
            program = load_program(functions[0].function) if functions[0].program else None
            rewards = load_rewards(functions) if program is None else []
            if built_in:
                limit_memory(True, memory, MemoryUse.now())  # what the libraries reserve grows with the CPU cores
            check_built_in(rewards)
        except BadInput as error:
            orchestrator.send(RewardRefused(cut_text(str(error))))
            return
        orchestrator.send(RewardLoaded(all(reward.per_response for reward in rewards)))
        if program is not None:
            asyncio.run(serve_episodes(orchestrator, program, message, _checked_score))
            return
        with asyncio.Runner() as runner:  # one loop for all calls, so that an async reward can keep its connections
            _serve_calls(orchestrator, rewards, runner, decode)


class MemoryUse(NamedTuple):
    """Bytes that this process uses; 0 where the system does not report it."""

    space: int
    """Address space."""
    data: int
    """Memory that the process may write and does not share."""

    @staticmethod
    def now() -> MemoryUse:
        """Read the current memory use."""
        try:
            pages = Path("/proc/self/statm").read_text().split()
        except OSError:
            return MemoryUse(0, 0)
        size = resource.getpagesize()
        return MemoryUse(int(pages[0]) * size, int(pages[5]) * size)

    def since(self, before: MemoryUse) -> MemoryUse:
        """Return what was added since `before`."""
        return MemoryUse(max(0, self.space - before.space), max(0, self.data - before.data))


def limit_memory(built_in: bool, memory: int, besides: MemoryUse) -> None:
    """Limit this process and each process that it starts: a built-in verifier's address space, or the data of a user's
    reward. `built_in`: whether all functions are; `besides`: memory that does not count as the reward's (of the
    tokenizer; for built-in ones of the libraries, too).

    Data is the memory that a process may write and does not share. A reward may hold a model and libraries that reserve
    more address space than there is memory, and data does not count that.
    """
    if built_in and hasattr(resource, "RLIMIT_AS"):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY + besides.space,) * 2)
    elif memory and hasattr(resource, "RLIMIT_DATA"):
        resource.setrlimit(resource.RLIMIT_DATA, (memory + besides.data,) * 2)


def score_group(
    rewards: Sequence[RewardFunction], runner: asyncio.Runner, prompt: Prompt, responses: list[Response]
) -> list[Score]:
    """Call each function of the reward in order and return one score for each response; `runner` then runs all async
    functions at once.

    Raises RewardError if a function raises, or does not return one finite number, Score or dict for each response. The
    error is that of the first such function, and no function is called after one that fails before it awaits anything.
    """
    found: list[Any] = []
    for reward in rewards:
        try:
            found.append(_score_with(reward, prompt, responses))
        except RewardError as error:
            found.append(error)
            break
    if any(map(inspect.iscoroutine, found)):
        try:
            found = runner.run(_all_scores(found))
        except asyncio.CancelledError:
            raise RewardError("an async function has cancelled tasks that are not its own") from None
    for reward, scores in zip(rewards, found, strict=False):
        if isinstance(scores, BaseException):
            told = str(scores) if isinstance(scores, RewardError) else f"raised {describe_error(scores, reward.file)}"
            raise RewardError(f"{reward.name} {told}" if reward.name else told)
    return [_weighted_sum(rewards, scores) for scores in zip(*found, strict=True)]


def _weighted_sum(rewards: Sequence[RewardFunction], scores: Sequence[Score | None]) -> Score:
    """The score of one response from those of all functions. None: the function does not apply to the response."""
    given = [(reward, score) for reward, score in zip(rewards, scores, strict=True) if score is not None]
    if not given:
        return Score(0.0, detail="no reward function applies", excluded=True)
    if not rewards[0].name:
        return given[0][1]
    value = _finite(math.fsum(reward.weight * score.value for reward, score in given), LARGEST_SCORE)
    if value is None:
        raise RewardError(f"has a weighted sum that is not {_EXPECTED_SCORE}")
    metrics: dict[str, float] = {}
    for reward, score in given:
        for name, number in ((reward.name, score.value), *score.metrics.items()):
            if name in metrics:
                raise RewardError(f"gives the metric {name} twice: rename it, or the function of this name")
            metrics[name] = number
    judged = [
        score.value >= 1 if reward.spec in BUILT_IN else score.correct
        for reward, score in given
        if (reward.weight if reward.spec in BUILT_IN else score.correct is not None)
    ]
    return Score(
        value=value,
        status=next((score.status for _, score in given if score.status != "ok"), "ok"),
        detail="; ".join(f"{reward.name}: {score.detail}" for reward, score in given if score.detail),
        excluded=any(score.excluded for _, score in given),
        correct=all(judged) if judged else None,
        metrics=metrics,
    )


def _score_with(
    reward: RewardFunction, prompt: Prompt, responses: list[Response]
) -> list[Score | None] | Coroutine[Any, Any, list[Score | None]]:
    """Call one function, for all responses if it takes one, and check what it returns: of an async one when the
    coroutine that is returned is awaited."""
    results: list[object] = []
    with UserCode(whatever=True) as attempt:  # a test harness that a reward runs may call sys.exit
        results = [reward.call(prompt, given) for given in (responses if reward.per_response else [responses])]
    if any(map(inspect.isawaitable, results)):
        return _awaited_scores(reward, results, len(responses))
    return _checked_scores(reward, results, attempt.error, len(responses))


async def _awaited_scores(reward: RewardFunction, results: list[object], count: int) -> list[Score | None]:
    with UserCode(whatever=True) as attempt:
        results = await _all_results(results)
    return _checked_scores(reward, results, attempt.error, count)


def _checked_scores(
    reward: RewardFunction, results: list[object], error: BaseException | None, count: int
) -> list[Score | None]:
    """Check what the calls of one function returned, or the error that one of them raised."""
    values: object = None
    with UserCode(whatever=True) as attempt:
        if error is not None:
            raise error
        values = results if reward.per_response else results[0]
        if isinstance(values, Iterable) and not isinstance(values, NO_LISTS):
            values = list(values)
    if attempt.error is not None:
        raise RewardError(f"raised {describe_error(attempt.error, reward.file)}")
    if not isinstance(values, list):
        raise RewardError(f"returned {type(values).__name__}, expected a list of {count} scores")
    if len(values) != count:
        raise RewardError(f"returned {len(values)} scores for {count} responses")
    scores: list[Score | None] = []
    with UserCode(whatever=True) as attempt:  # numbers of their own classes
        scores = [
            None if value is None and reward.may_skip else _checked_score(value, index)
            for index, value in enumerate(values)
        ]
    if attempt.error is not None and not isinstance(attempt.error, RewardError):
        raise RewardError(f"returned a score that can't be read: {describe_error(attempt.error, reward.file)}")
    if attempt.error is not None:
        raise attempt.error
    return scores


async def _all_scores(found: list[Any]) -> list[Any]:
    """Await the coroutines among `found` at once, and put their scores or errors in their places."""
    ended = await asyncio.gather(*filter(inspect.iscoroutine, found), return_exceptions=True)
    places = iter(ended)
    return [next(places) if inspect.iscoroutine(one) else one for one in found]


async def _all_results(results: list[object]) -> list[object]:
    """Await those of `results` that can be awaited, all at once. Raises the first error in their order, when all have
    ended: nothing of this call goes on in the next one."""
    ended = await asyncio.gather(*(_settled(result) for result in results))
    for error, _ in ended:
        if error is not None:
            raise error
    return [found for _, found in ended]


async def _settled(result: Any) -> tuple[BaseException | None, object]:  # noqa: ANN401
    """An error and a value, one of them None. What would end a process is an error too: it must not leave the task,
    because it would end the loop, and come again with the next call."""
    with UserCode(whatever=True) as attempt:
        return None, await result if inspect.isawaitable(result) else result
    return attempt.error, None


def _checked_score(value: object, index: int) -> Score:
    """Check one returned score. The value of an excluded Score is not read."""
    if isinstance(value, Mapping):
        result = _score_of_dict(value, index)
    else:
        result = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]
    number = 0.0 if result.excluded else _finite(result.value, LARGEST_SCORE)
    if number is None:
        raise RewardError(
            f"returned {_shown(result.value)} for response {index}, "
            f"expected {_EXPECTED_SCORE}, a Score, or a dict with a score"
        )
    return Score(
        value=number,
        status=str(result.status)[:LONGEST_STATUS],
        detail=cut_text(str(result.detail)),
        excluded=bool(result.excluded),
        correct=None if result.correct is None else bool(result.correct),
        metrics=_checked_metrics(result.metrics, index),
    )


def _score_of_dict(value: Mapping[Any, Any], index: int) -> Score:
    """Return a dict as verl's rewards return it as a Score: its texts are the detail, its numbers the metrics."""
    keys = [key for key in SCORE_KEYS if key in value]
    if len(keys) != 1:
        raise RewardError(
            f"returned a dict with the keys {', '.join(map(str, value))} for response {index}, expected the score "
            f"under one of the keys {' and '.join(SCORE_KEYS)}"
        )
    rest = {key: found for key, found in value.items() if key not in SCORE_KEYS and found is not None}
    texts = {key: found for key, found in rest.items() if isinstance(found, str)}
    return Score(
        value=value[keys[0]],
        detail=", ".join(f"{key}: {found}" for key, found in texts.items()),
        metrics={key: found for key, found in rest.items() if key not in texts},
    )


def _checked_metrics(metrics: object, index: int) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise RewardError(f"returned {_shown(metrics)} as the metrics of response {index}, expected a dict of numbers")
    found = {}
    for name, value in metrics.items():
        number = _finite(value)
        if number is None:
            raise RewardError(
                f"returned {_shown(value)} as the metric {name} of response {index}, expected a number that is finite "
                "in fp32"
            )
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise RewardError(f"returned a metric named {_shown(name)} for response {index}; a name has {METRIC_NAMES}")
        found[name] = number
    return found


def _finite(value: object, largest: float = LARGEST) -> float | None:
    """Return what Python, NumPy or torch treats as a single number as a float; None for anything else, and if it is
    larger than `largest`."""
    if isinstance(value, str | bytes | bytearray):  # float() would parse their text
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises a RuntimeError for several numbers
        return None
    return number if abs(number) <= largest else None


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer with more digits than Python converts
        return f"a number of type {type(value).__name__} with too many digits"


def _serve_calls(
    orchestrator: _Orchestrator, rewards: Sequence[RewardFunction], runner: asyncio.Runner, decode: Decode
) -> None:
    while isinstance(message := orchestrator.receive(), ScoreCall):
        try:
            scores = score_group(rewards, runner, *verifier_messages.score_arguments(message, decode))
        except RewardError as error:
            orchestrator.send(RewardFailed(cut_text(str(error)), message.number))
        else:
            orchestrator.send(Scores.of(scores, message.number))


class _Orchestrator:
    """The connection to the orchestrator. Only this process uses it: what a reward forks never answers."""

    def __init__(self, connection: socket.socket) -> None:
        connection.set_inheritable(False)
        self._connection = connection
        self._process = os.getpid()
        os.register_at_fork(after_in_child=connection.close)

    def send(self, message: VerifierMessage) -> None:
        """Send a message. A child of this process ends here, as if its parent's code were not there."""
        if os.getpid() != self._process:
            os._exit(0)
        frame = verifier_messages.frame_message(message)
        if isinstance(message, Scores) and len(frame) > MOST_ANSWER:
            why = f"returned scores of {len(frame):,} bytes with their metrics, expected at most {MOST_ANSWER:,}"
            frame = verifier_messages.frame_message(RewardFailed(why, message.number))
        self._connection.sendall(frame)

    def receive(self) -> VerifierMessage | None:
        """Return the next message; None if the orchestrator has closed the socket.

        The wait has no limit, because the lifeline ends this process if the orchestrator dies.
        """
        head = self._read_exactly(HEADER.size)
        return verifier_messages.read_message(self._read_exactly(verifier_messages.body_size(head))) if head else None

    def _read_exactly(self, count: int) -> bytes:
        """Return `count` bytes; b"" if the socket was closed before all of them arrived."""
        data = bytearray()
        while len(data) < count:
            part = b""
            with contextlib.suppress(ConnectionResetError):  # the orchestrator was killed before it read an answer
                part = self._connection.recv(count - len(data))
            if not part:
                return b""
            data += part
        return bytes(data)


def _print_to_stderr() -> None:
    """Send what a reward prints to stderr, line by line, so that the lines survive even if the process is killed."""
    os.dup2(2, 1)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)


if __name__ == "__main__":
    main(
        socket_fd=int(sys.argv[1]),
        memory=int(sys.argv[2]),
        processes=int(sys.argv[3]),
        functions=verifier_messages.open_functions(sys.argv[4]),
    )
