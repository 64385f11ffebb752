"""Runs rollout programs in verifier processes: an episode for each response, many at once in each process.

The conversation is kept here. The process gets each turn that was sampled and sends what the program appends.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from engine.config import Config
from engine.data.loader import turn_seed
from engine.errors import MetronomeError, ProcessDied, RewardError
from engine.orchestrator.pool.instance_client import SamplingSettings
from engine.orchestrator.pool.reply_check import problem_of_tokens
from engine.orchestrator.workers.verifier_pool import AwakeTimer, VerifierProcess, WorkerDied
from engine.types import Prompt, Score
from engine.wire import verifier_messages
from engine.wire.columns import PackedResponse, open_ids
from engine.wire.verifier_messages import (
    BeginEpisode,
    EpisodeOver,
    LoadTokenizer,
    SampleTurn,
    StopEpisode,
    TurnSampled,
    VerifierMessage,
    WeightedFunction,
)

STOP_S = 5.0
"""Seconds in which a program must end once it is stopped. Else its process hangs, and is killed."""


@dataclass(frozen=True)
class TurnRequest:
    """What an instance is asked for."""

    prompt: Prompt
    """Its `token_ids` are the conversation so far."""
    sampling: SamplingSettings
    seed: int | None


@dataclass(eq=False)
class _ProgramWorker:
    """A process and the episodes in it."""

    process: VerifierProcess
    inboxes: dict[int, asyncio.Queue[VerifierMessage | MetronomeError]] = field(default_factory=dict)
    """By number of the attempt: what its process has sent, or how it ended."""
    is_stale: bool = False
    """Whether a program ran out of time in it, and may have left threads that hang."""
    reader: asyncio.Task[None] | None = None

    def begin_reading(self) -> None:
        """Read the messages of the process in the background."""
        self.reader = asyncio.create_task(self._read_messages())

    def end(self, error: MetronomeError) -> None:
        """Read no more, and give all episodes in the process this error."""
        if self.reader is not None:
            self.reader.cancel()
        self.end_episodes(error)

    def replace(self, why: str) -> None:
        """Kill the process and start another. The episodes in it begin again."""
        self.end(WorkerDied(why))
        self.process.restart()
        self.begin_reading()

    def leave(self, attempt: int) -> None:
        """Forget an attempt. A stale process is replaced once it has no other."""
        self.inboxes.pop(attempt, None)
        if self.is_stale and not self.inboxes:
            self.replace("")

    async def _read_messages(self) -> None:
        """Give each message to its episode. If the process dies, all episodes in it get the error, and another
        starts."""
        while True:
            try:
                await self.process.ready()
                while True:
                    message = await self.process.receive()
                    inbox = self.inboxes.get(getattr(message, "number", -1))
                    if inbox is not None and isinstance(message, SampleTurn | EpisodeOver):
                        inbox.put_nowait(message)
            except WorkerDied as error:
                self.end_episodes(error)
                self.process.restart()
            except MetronomeError as error:  # it can't be loaded, or was closed
                self.end_episodes(error)
                return

    def end_episodes(self, error: MetronomeError) -> None:
        """Give all episodes in the process this error."""
        for inbox in self.inboxes.values():
            inbox.put_nowait(error)
        self.inboxes.clear()
        self.is_stale = False


class ProgramPool:
    """Runs `rollout.program`. Bound to the event loop that calls `start`.

    Every episode that begins ends with a response, with an error that is raised, or by `Episode.close`.
    """

    def __init__(self, config: Config, log: Path | None = None) -> None:
        """`log`: file for what the program prints."""
        self.config = config
        function = WeightedFunction(config.rollout.program, program=True)
        self._workers = [
            _ProgramWorker(VerifierProcess(f"program {index}", [function], config.reward, log))
            for index in range(config.reward.workers)
        ]
        self._attempts = 0

    async def start(self, tokenizer: LoadTokenizer) -> None:
        """Start all processes. Raises BadInput if the program can't be loaded."""
        tokenizer = msgspec.structs.replace(
            tokenizer,
            variables=json.dumps(self.config.data.chat_template_kwargs).encode(),
        )
        for worker in self._workers:
            worker.process.launch(tokenizer)
        for worker in self._workers:
            await worker.process.ready()
            worker.begin_reading()

    def close(self) -> None:
        """Kill all processes. Episodes under way raise ProcessDied."""
        for worker in self._workers:
            worker.process.close()
            worker.end(ProcessDied("the programs were closed before the response was complete"))

    def begin_episode(self, prompt: Prompt, seed: int | None, sampling: SamplingSettings) -> Episode:
        """Begin a response. It takes a process when its first turn is asked for."""
        return Episode(self, prompt, seed, sampling)

    def take_worker(self) -> tuple[_ProgramWorker, int]:
        """Return the process with the fewest episodes, and a number for the attempt."""
        found = min(self._workers, key=lambda worker: (worker.is_stale, len(worker.inboxes)))
        self._attempts += 1
        found.inboxes[self._attempts] = asyncio.Queue()
        return found, self._attempts


@dataclass
class _Conversation:
    """What follows the prompt, from when the program began."""

    timer: AwakeTimer
    """The time that the program may still take."""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: bytearray = field(default_factory=bytearray)
    """fp32; 0 for tokens that were appended."""
    mask: bytearray = field(default_factory=bytearray)
    versions: list[tuple[int, int]] = field(default_factory=list)
    turns: int = 0
    sampled_to: int = 0
    """Number of tokens up to the end of the last turn."""
    instance: str = ""
    cut: bool = False
    """Whether a limit of the response ended it."""
    asked: TurnRequest | None = None


class Episode:
    """One response of a program. It is the only owner of its conversation; a turn is added once."""

    def __init__(self, pool: ProgramPool, prompt: Prompt, seed: int | None, sampling: SamplingSettings) -> None:
        self.score: Score | None = None
        """The program's own score, or that of its failure; None: the reward scores the response."""
        self.rewritten = ""
        """As `EpisodeOver.rewritten`."""
        self._pool = pool
        self._prompt = prompt
        self._seed = seed
        self._sampling = sampling
        self._worker: tuple[_ProgramWorker, int] | None = None
        self._over = False
        self._died = False
        """Whether its process has died once."""
        self._program_s = 0.0
        self._talk = self._new_talk()

    def _new_talk(self) -> _Conversation:
        return _Conversation(AwakeTimer(self._pool.config.rollout.program_timeout_s))

    async def next_turn(self) -> TurnRequest | None:
        """Return the turn that the program asks for, the same one until `add_turn`; None once the program is over.

        If its process dies, the program begins again with the same seeds, once. Raises RewardError if it fails or takes
        too long and the recipe says "stop".
        """
        while self._talk.asked is None and not self._over:
            try:
                await self._take_message()
            except WorkerDied as error:
                self._leave()
                if self._died:
                    self._fail("error", f"two processes died of it; last error: {error}")
                else:
                    self._died = True
                    self._talk = self._new_talk()
            except TimeoutError:
                await self._end_late_program()
                self._fail("timeout", f"not over within {self._pool.config.rollout.program_timeout_s:g} s")
        return self._talk.asked

    async def _take_message(self) -> None:
        if self._worker is None:
            worker, attempt = self._worker = self._pool.take_worker()
            call = verifier_messages.make_score_call(self._prompt, (), text_only=False)
            await worker.process.ready()
            worker.process.send(BeginEpisode(attempt, call))
        message = await self._wait_for_message(*self._worker)
        if isinstance(message, SampleTurn):
            self._ask(message)
        elif isinstance(message, EpisodeOver):
            self._leave()
            self._over = True
            self.rewritten = message.rewritten
            if message.error:
                self._fail("error", message.error)
            elif message.scores is not None:
                self.score = message.scores.opened()[0]
        elif isinstance(message, MetronomeError):
            raise message

    async def _wait_for_message(self, worker: _ProgramWorker, attempt: int) -> VerifierMessage | MetronomeError:
        """Raises TimeoutError once the program has used up its time."""
        inbox = worker.inboxes.get(attempt)
        if inbox is None:
            raise WorkerDied("its process ended")
        before = self._talk.timer.left_s
        try:
            return await self._talk.timer.wait(inbox.get())
        finally:
            self._program_s += before - self._talk.timer.left_s

    async def _end_late_program(self) -> None:
        """Stop the program. One that does not even end holds up its process, which is replaced."""
        assert self._worker is not None, "a message was awaited"
        worker, attempt = self._worker
        if (inbox := worker.inboxes.get(attempt)) is not None:
            worker.is_stale = True
            worker.process.send(StopEpisode(attempt))
            try:
                await AwakeTimer(STOP_S).wait(inbox.get())
            except TimeoutError:
                worker.replace("another program in its process hung")
        self._leave()

    def _ask(self, message: SampleTurn) -> None:
        """Append what the program says, and note the turn that it asks for."""
        config = self._pool.config.rollout
        appended = open_ids(message.appended)
        if wrong := problem_of_tokens(np.array(appended, np.int64), self._sampling.vocabulary):
            self._over = True
            self._fail("error", f"appended tokens: {wrong}")
            self._stop()
            return
        self._append(appended, bytes(4 * len(appended)), sampled=False)
        used = len(self._talk.token_ids)
        room = min(self._sampling.max_new_tokens, config.max_context - len(self._prompt.token_ids)) - used
        if room < 1 or self._talk.turns >= config.max_turns:
            self._talk.cut = True
            self._answer(b"", "length")
            return
        self._talk.asked = TurnRequest(
            prompt=replace(self._prompt, token_ids=[*self._prompt.token_ids, *self._talk.token_ids]),
            sampling=replace(
                self._sampling,
                max_new_tokens=min(room, message.max_new_tokens or room),
                stop_token_ids=(*self._sampling.stop_token_ids, *message.stop),
            ),
            seed=None if self._seed is None else turn_seed(self._seed, self._talk.turns),
        )

    def _append(self, token_ids: Sequence[int], logprobs: bytes, sampled: bool) -> None:
        self._talk.token_ids.extend(token_ids)
        self._talk.logprobs += logprobs
        self._talk.mask += (b"\x01" if sampled else b"\x00") * len(token_ids)

    def add_turn(self, turn: PackedResponse) -> None:
        """Add a turn that was sampled, and give it to the program. Unless responses may be `mixed`, one begins again,
        with the same seeds, if the turn is of other weights than those before."""
        assert self._talk.asked is not None, "`next_turn` comes first"
        known = self._talk.versions
        if known and not self._sampling.mixed and turn.versions[:1] != ((0, known[-1][1]),):
            self._stop()
            self._talk = self._new_talk()
            return
        begun = len(self._talk.token_ids)
        for start, version in turn.versions:
            if not self._talk.versions:
                self._talk.versions.append((0, version))  # tokens before the first turn have no version of their own
            elif self._talk.versions[-1][1] != version:
                self._talk.versions.append((begun + start, version))
        self._append(open_ids(turn.token_ids), turn.logprobs, sampled=True)
        self._talk.sampled_to = len(self._talk.token_ids)
        self._talk.cut = turn.finish_reason == "length" and self._is_full()
        self._talk.turns += 1
        self._talk.instance = turn.instance
        self._talk.asked = None
        self._answer(turn.token_ids, turn.finish_reason)

    def _is_full(self) -> bool:
        used = len(self._talk.token_ids)
        longest = self._pool.config.rollout.max_context - len(self._prompt.token_ids)
        return used >= min(self._sampling.max_new_tokens, longest)

    def _answer(self, token_ids: bytes, finish_reason: str) -> None:
        if self._worker is not None:
            worker, attempt = self._worker
            worker.process.send(TurnSampled(attempt, token_ids, finish_reason))

    def response(self) -> PackedResponse:
        """Return the response. What the program appended after its last turn is left out."""
        count = self._talk.sampled_to
        return PackedResponse(
            token_ids=self._talk.token_ids[:count].tobytes(),
            logprobs=bytes(self._talk.logprobs[: 4 * count]),
            versions=tuple(self._talk.versions),
            loss_mask=bytes(self._talk.mask[:count]),
            finish_reason="length" if self._talk.cut else "stop",
            seed=self._seed,
            instance=self._talk.instance,
        )

    def figures(self) -> Mapping[str, float]:
        """Return the metrics that are added to its score."""
        return {
            "episode/turns": float(self._talk.turns),
            "episode/environment_tokens": float(self._talk.mask[: self._talk.sampled_to].count(0)),
            "episode/program_s": self._program_s,
        }

    def _fail(self, status: str, why: str) -> None:
        """End with a score that says why. Raises RewardError if the recipe says "stop"."""
        reward = self._pool.config.reward
        choice = reward.on_timeout if status == "timeout" else reward.on_error
        what = f'rollout.program = "{self._pool.config.rollout.program}", prompt {self._prompt.id}: {why}'
        if choice == "stop":
            raise RewardError(what)
        self._over = True
        self.score = Score(0.0, status, what, excluded=choice == "exclude")

    def _leave(self) -> None:
        if self._worker is not None:
            worker, attempt = self._worker
            self._worker = None
            worker.leave(attempt)

    def _stop(self) -> None:
        if self._worker is not None:
            worker, attempt = self._worker
            worker.process.send(StopEpisode(attempt))
            self._leave()

    def close(self) -> None:
        """Stop the program if it is not over."""
        self._stop()
