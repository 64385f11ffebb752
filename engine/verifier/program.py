"""Runs a user's rollout program in a verifier process: many episodes at once, one for each response.

The program sees a `Chat`. The conversation itself is the orchestrator's: a turn's tokens come from there, and only what
the program appends goes back, so a program can't change what was sampled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from os.path import commonprefix
from threading import Thread
from typing import Any, Protocol

from engine.data.tokenizer import TokenizerFile
from engine.errors import BadInput, OutOfRoom, RewardError, cut_text
from engine.run.user_code import UserCode, describe_error, load_function
from engine.types import Prompt, Score
from engine.wire import verifier_messages
from engine.wire.columns import open_ids, pack_ids
from engine.wire.verifier_messages import (
    BeginEpisode,
    EpisodeOver,
    LoadTokenizer,
    SampleTurn,
    Scores,
    StopEpisode,
    TurnSampled,
    VerifierMessage,
)

MARK = "metronome-turn-{salt}-{place};"
"""Stands for a turn when a chat template is asked what stands around it. No text of the conversation has it."""
LARGEST = 2**31
"""More tokens than a turn can have."""
SHOWN = 40
"""Characters of a rewritten turn that a message shows."""


@dataclass(frozen=True)
class Program:
    """A rollout program, ready to be called."""

    call: Callable[..., Any]
    """async (prompt, chat) -> float | Score | dict | None."""
    file: str
    """The file that defines it. Error messages name the innermost line in this file."""


@dataclass(frozen=True)
class Turn:
    """One sampled turn."""

    text: str
    """As `Response.text`: without the tokens that end a turn."""
    token_ids: Sequence[int]
    finish_reason: str
    """"stop" (a stop token was sampled; it is the last one) or "length" (a limit cut it)."""


class Channel(Protocol):
    """The connection to the orchestrator."""

    def send(self, message: VerifierMessage) -> None:
        """Send a message."""

    def receive(self) -> VerifierMessage | None:
        """Wait for the next message; None once the connection is closed."""


def load_program(spec: str) -> Program:
    """Load `rollout.program`. Raises BadInput unless it is an async function of (prompt, chat)."""
    function, file = load_function("rollout.program", spec, "a program", "async (prompt, chat)")
    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        inspect.signature(function).bind(None, None)
        fits = inspect.iscoroutinefunction(function)
    except TypeError:
        fits = False
    if not fits:
        raise BadInput(f'rollout.program = "{spec}": expected async def {spec.rpartition(":")[2]}(prompt, chat)')
    return Program(function, code.co_filename if code is not None else file)


class Chat:
    """The conversation of one response, as its program sees it."""

    def __init__(self, number: int, prompt: Prompt, channel: Channel, tokenizer: TokenizerFile) -> None:
        self.rewritten = ""
        """As `EpisodeOver.rewritten`."""
        self._turns: list[int] = []
        """Places of the turns in the history."""
        self._number = number
        self._channel = channel
        self._tokenizer = tokenizer
        self._appended: list[int] = []
        self._messages: list[int] = []
        """Tokens that `messages` has appended since the last turn."""
        self._last: Turn | None = None
        self._waiting: asyncio.Future[TurnSampled] | None = None
        self._history: list[Mapping[str, Any]] = [{"role": "user", "content": prompt.problem}]
        self._variables: Mapping[str, Any] = {}
        """The template's variables with which the history was written."""
        self._prompt = prompt
        self.length = len(prompt.token_ids)
        """Tokens of the prompt and of everything up to the last turn."""

    async def complete(self, *, stop: str | Sequence[str] = (), max_new_tokens: int = 0) -> Turn:
        """Sample the next turn. Its tokens are trained.

        `stop`: texts of one token each that end this turn, besides `rollout.stop`. `max_new_tokens`: limit of this
        turn; 0: what is left of the response. Raises OutOfRoom if no token or no turn is left, BadInput for a stop of
        several tokens.
        """
        stops, limit = self.check_limits(stop, max_new_tokens)
        self._waiting = asyncio.get_running_loop().create_future()
        self.length += len(self._appended)
        appended = pack_ids(self._appended)
        self._appended = []
        self._messages = []
        self._channel.send(SampleTurn(self._number, appended, stops, limit))
        try:
            sampled = await self._waiting
        finally:
            self._waiting = None
        token_ids = open_ids(sampled.token_ids)
        if not len(token_ids):
            raise OutOfRoom("the response has no token or no turn left")
        self.length += len(token_ids)
        self._last = Turn(self._tokenizer.decode(token_ids), token_ids, sampled.finish_reason)
        self._turns.append(len(self._history))
        self._history.append({"role": "assistant", "content": self._last.text})
        return self._last

    def check_limits(self, stop: str | Sequence[str], max_new_tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the limits of a turn as they are sent. Raises BadInput if `complete` would for them, and
        RuntimeError while a turn is sampled."""
        if self._waiting is not None:
            raise RuntimeError("chat.complete: the turn before is still being sampled; await it first")
        stops = tuple(map(self._tokenizer.one_token, (stop,) if isinstance(stop, str) else stop))
        return stops, min(max(0, int(max_new_tokens)), LARGEST)

    def append(self, what: str | Sequence[int] | Mapping[str, Any]) -> None:
        """Append what the environment says: a text, token ids, or a message for the chat template. It is not
        trained. A text is tokenized alone."""
        if isinstance(what, Mapping):
            self.messages([what])
        else:
            self._appended += self._tokenizer.encode(what) if isinstance(what, str) else map(int, what)

    def messages(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> None:  # noqa: ANN401
        """Append messages in the model's chat template, and the start of the next answer. `variables`: the template's
        own, besides data.chat_template_kwargs.

        What the template writes after the last turn is appended. What was sampled stays as it is, also where the
        template would rewrite it. Several calls after a turn append what one call with all their messages would. Raises
        RuntimeError before the first turn, and BadInput if the template fails, if a text was appended between two
        calls, or if other variables than before change what the template writes before the last turn.
        """
        if self._last is None:
            raise RuntimeError("chat.messages: the prompt is in its template already; messages follow a turn")
        kept = len(self._appended) - len(self._messages)
        if self._appended[kept:] != self._messages:
            raise BadInput("chat.messages: a text was appended after messages; sample a turn before further messages")
        history = [*self._history, *messages]
        written = self._tokenizer.render(history, variables)
        marks = self._make_marks(written + repr(history))
        marked = list(history)
        for place, mark in marks.items():
            marked[place] = {**history[place], "content": mark}
        text = self._tokenizer.render(marked, variables)
        _, last, after = text.rpartition(marks[self._turns[-1]])
        if not last:
            raise BadInput("chat.messages: the chat template leaves out the last turn")
        if variables != self._variables:
            self._check_variables(marked[: self._turns[-1] + 1], variables)
        self._note_rewrite(written, text, marks)
        ids = self._tokenizer.encode(after)
        if ids[:1] == list(self._last.token_ids)[-1:]:
            ids = ids[1:]  # the end of the turn was sampled
        self._history += messages
        self._variables = variables
        self._appended[kept:] = self._messages = ids  # `after` has the messages of earlier calls too

    def _check_variables(self, said: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        """Raise BadInput if variables change what the template writes up to the last turn, which the model has seen."""
        turn = said[-1]["content"]  # what follows it is new
        stands = self._tokenizer.render(said, self._variables).rpartition(turn)[0]
        written = self._tokenizer.render(said, variables).rpartition(turn)[0]
        if stands != written:
            keys = sorted(variables.keys() | self._variables.keys())
            raise BadInput(
                f"other {' or '.join(keys)} than before: the chat template would write {_difference(stands, written)} "
                "before the last turn, which the model would not see; a conversation keeps those with which it "
                "begins (data.chat_template_kwargs, or the first request)"
            )

    def _make_marks(self, text: str) -> Mapping[int, str]:
        """Return a mark for the place of each turn; `text` has none of them."""
        salt = 0
        while any(MARK.format(salt=salt, place=place) in text for place in self._turns):
            salt += 1
        return {place: MARK.format(salt=salt, place=place) for place in self._turns}

    def _note_rewrite(self, written: str, marked: str, marks: Mapping[int, str]) -> None:
        """Note where what the template makes of the turns differs from the turns in place of their marks."""
        for place, mark in marks.items():
            marked = marked.replace(mark, self._history[place]["content"])
        if written != marked:
            self.rewritten = _difference(marked, written)

    def begin(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> None:  # noqa: ANN401
        """Say which messages the prompt begins, before the first turn. What follows the prompt in their chat template
        is appended. `variables`: the template's own. Raises BadInput if the prompt is not how they begin, or if the
        conversation has begun already."""
        if self._turns or self._appended:
            raise BadInput("the conversation has begun already: chat.openai() begins it, once and before all else")
        text = self._tokenizer.render(messages, variables)
        token_ids = self._tokenizer.encode(text)
        count = len(self._prompt.token_ids)
        if token_ids[:count] != list(self._prompt.token_ids):
            raise BadInput(
                f"the messages in the chat template are {text!r:.300}, which does not begin with the prompt "
                f"{self._tokenizer.decode(self._prompt.token_ids)!r:.300} (data.prompt_template)"
            )
        self._history = list(messages)
        self._variables = variables
        self._appended += token_ids[count:]

    def openai(self) -> AbstractAsyncContextManager[tuple[str, str]]:
        """Let an agent that speaks OpenAI's API have this conversation: `async with chat.openai() as (base_url, key)`.

        Each of its chat completions is a turn (docs/programs.md). Raises OutOfRoom as `complete` does.
        """
        from engine.verifier.openai_server import serve_conversation  # aiohttp takes a third of a second

        return serve_conversation(self)

    def receive_turn(self, sampled: TurnSampled) -> None:
        """Give the program the turn that it waits for."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(sampled)


def _difference(was: str, now: str) -> str:
    """Where one text begins to differ from another, for messages."""
    begin = len(commonprefix((was, now)))
    return f"{was[begin : begin + SHOWN]!r} as {now[begin : begin + SHOWN]!r}"


async def serve_episodes(
    channel: Channel, program: Program, loaded: LoadTokenizer, check: Callable[[object, int], Score]
) -> None:
    """Run episodes until the orchestrator closes the connection. `check`: checks a score that a program returned."""
    tokenizer = TokenizerFile(loaded)
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[VerifierMessage | None] = asyncio.Queue()

    def read() -> None:
        message: VerifierMessage | None = loaded
        while message is not None:
            message = channel.receive()
            loop.call_soon_threadsafe(inbox.put_nowait, message)

    Thread(target=read, daemon=True).start()
    chats: dict[int, Chat] = {}
    tasks: dict[int, asyncio.Task[None]] = {}
    while (message := await inbox.get()) is not None:
        if isinstance(message, BeginEpisode):
            prompt, _ = verifier_messages.score_arguments(message.prompt, tokenizer.decode)
            number = message.number
            chats[number] = Chat(number, prompt, channel, tokenizer)
            tasks[number] = loop.create_task(
                _run_episode(
                    number=number, program=program, prompt=prompt, chat=chats[number], channel=channel, check=check
                )
            )
        elif isinstance(message, TurnSampled) and message.number in chats:
            chats[message.number].receive_turn(message)
        elif isinstance(message, StopEpisode) and message.number in tasks:
            tasks[message.number].cancel()
        for number in [number for number, task in tasks.items() if task.done()]:
            del tasks[number], chats[number]


async def _run_episode(
    number: int,
    program: Program,
    prompt: Prompt,
    chat: Chat,
    channel: Channel,
    check: Callable[[object, int], Score],
) -> None:
    """Run the program for one response, and send what came out, or that it was stopped."""
    value: object = None
    score = None
    error = ""
    with UserCode(whatever=True) as attempt:
        value = await program.call(prompt, chat)
    if attempt.error is not None and not isinstance(attempt.error, OutOfRoom):
        error = f"raised {describe_error(attempt.error, program.file)}"
    elif value is not None:
        try:
            score = Scores.of([check(value, 0)], 0)
        except RewardError as wrong:
            error = str(wrong)
    channel.send(EpisodeOver(number, score, cut_text(error), chat.rewritten))
