"""The client of the service (`metronome service`), with the names of AsyncFlow §5.1: a trainer or a program of your own
uses a run's rollout instances, its rewards and its weight sync (docs/service.md)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import httpx
import msgspec
import torch

from engine.client.weight_channel import OneRank, WeightChannel
from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, ServiceFull
from engine.run.commands import service_command
from engine.run.folder import dump
from engine.run.process import Child
from engine.trainer.publish.publisher import PublishedModel, Publisher
from engine.trainer.publish.transports import open_transport
from engine.types import Group, Prompt, Response
from engine.wire.access_token import access_token, authorization
from engine.wire.address import split_address
from engine.wire.codec import open_response, pack_ids
from engine.wire.messages import Answer, ControlRequest, Done, EndOfStep, Failure, Lease, Window, pack
from engine.wire.sealed import SealedGroup, open_group, seal_group
from engine.wire.service_messages import (
    CONTENT_TYPE,
    SERVICE_FILE,
    SERVICE_PROTOCOL,
    AwaitVersion,
    InitEngines,
    PromptData,
    PutGroup,
    PutPrompts,
    SampleResponses,
    read_reply,
)
from engine.wire.weights.buckets import DTYPES

FULL_S = 0.2
"""Seconds before a request that the full service refused is sent again."""
LOOK_S = 0.1
"""Seconds between two looks for the address of a service that starts."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class ExperienceLease:
    """Groups to train, which are acknowledged afterwards."""

    number: int
    step: int
    groups: tuple[Group, ...]
    lease_s: float | None
    """Seconds after which the groups may be given to another program."""
    deliveries: int
    """How often the groups were given, this time included."""


class ServiceClient:
    """A running service. Its methods may be called from several threads, but weights are published by one."""

    def __init__(self, address: str, child: Child | None = None, timeout_s: float = 60.0) -> None:
        """`address`: host:port; `child`: the service's process if this program has started it; `timeout_s`: seconds to
        wait for an answer to `init_engines`."""
        self._url = f"http://{address}"
        self._child = child
        self._http = httpx.Client(headers={**authorization(access_token()), "Content-Type": CONTENT_TYPE})
        self._timeout_s = timeout_s
        self._publisher: Publisher | None = None
        ready = self.ask("init_engines", InitEngines(protocol=SERVICE_PROTOCOL))
        self.config: Config = Config.model_validate_json(ready.config)
        """The service's recipe."""
        self.version: int | None = ready.version
        """The weight version that was published last when this object was made; None before the first."""
        self._weights = Path(ready.weights)
        self._timeout_s = self.config.transfer_timeout_s

    @classmethod
    def init_engines(cls, engines: Config | Path | str) -> ServiceClient:
        """Start the engines of a recipe (its `model.path` a Hugging Face folder), or use those of a running service:
        its host:port, or its run folder. Those that were started end with `close`, and with this process.

        Raises BadInput for an address that is none or a recipe that the service does not take, DeadlineError if the
        engines are not there within rollout.timeout_s.
        """
        if isinstance(engines, Config):
            return cls._start(engines)
        path = Path(engines).expanduser()
        if path.is_dir():
            file = path / SERVICE_FILE
            if not file.exists():
                raise BadInput(f"{path}: no service runs here (it would have {SERVICE_FILE}); see `metronome service`")
            return cls(file.read_text().strip())
        split_address(str(engines), "the service's address")
        return cls(str(engines))

    @classmethod
    def _start(cls, config: Config) -> ServiceClient:
        address = config.folder / SERVICE_FILE
        address.unlink(missing_ok=True)
        log = config.folder / "logs" / "service.log"
        with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
            recipe = Path(scratch) / "recipe.toml"
            dump(config, recipe)
            child = Child("service", service_command(recipe), log)
            try:
                deadline = time.monotonic() + config.rollout.timeout_s
                while not address.exists():
                    if child.refused_input:
                        raise BadInput(f"the service {child.how_it_ended()}")
                    child.check()
                    if time.monotonic() > deadline:
                        raise DeadlineError(f"the service did not start within {config.rollout.timeout_s:g} s: {log}")
                    time.sleep(LOOK_S)
                return cls(address.read_text().strip(), child)
            except BaseException:
                child.stop()
                raise

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the service, and end the engines if this object has started them."""
        self._http.close()
        if self._child is not None:
            self._child.stop(grace_s=10.0)

    # experience -----------------------------------------------------------------------------------

    def put_prompts_data(self, step: int, prompts: Sequence[Prompt] | None = None) -> bool:
        """Have responses to a step's prompts sampled and scored; None: to the next ones of the recipe's data.

        Return False if the same was put already. The reward sees problem, answer and columns of your own prompts, whose
        sampling seeds depend on the step. Raises ServiceConflict if the step has other prompts or is not due.
        """
        data = None if prompts is None else tuple(map(_prompt_data, prompts))
        return self._put("put_prompts_data", PutPrompts(step=step, prompts=data), f"the prompts of step {step}")

    def put_experience_data(self, group: Group | SealedGroup, wait_s: float | None = None) -> bool:
        """Put a group that was sampled and scored outside; a step whose first group comes so has all of them so.

        Return False if the same group is there. While the service is full, waits up to `wait_s` seconds (None:
        `Config.transfer_timeout_s`), then raises DeadlineError. Raises BadInput for a damaged or incomplete group,
        StaleRolloutError where a token's weight version is not accepted for the step, ServiceConflict for another group
        at the same place.
        """
        sealed = group if isinstance(group, SealedGroup) else seal_group(group)
        what = f"group {sealed.index} of step {sealed.step}"
        return self._put("put_experience_data", PutGroup(group=sealed), what, wait_s)

    def _put(self, route: str, request: PutPrompts | PutGroup, what: str, wait_s: float | None = None) -> bool:
        return self._until_room(lambda: self.ask(route, request), f"for room in the service for {what}", wait_s).new

    def get_experience_data(
        self, step: int, consumer: str = "trainer", budget: int = 0, trained: ExperienceLease | None = None
    ) -> ExperienceLease | None:
        """Wait for groups of a step; None once all of its groups are acknowledged. `budget`: most tokens; 0: the
        recipe's window. One group is always given. `trained` is acknowledged before, with the same request.

        A lease that is not acknowledged within service.lease_s is given again: at least once. The groups' bytes are
        compared with their digests. Raises DeadlineError if nothing comes within `Config.transfer_timeout_s`, and what
        `acknowledge` raises.
        """
        budget = budget or self.config.window_tokens
        done = () if trained is None else (trained.number,)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            request = Lease(step=step, budget=budget, trained=done, consumer=consumer)
            reply = self.ask("get_experience_data", request)
            done = ()
            if isinstance(reply, EndOfStep):
                return None
            if isinstance(reply, Window):
                groups = tuple(open_group(group, reply.batch) for group in reply.groups)
                return ExperienceLease(
                    number=reply.lease,
                    step=step,
                    groups=groups,
                    lease_s=reply.lease_s,
                    deliveries=reply.deliveries,
                )
        raise DeadlineError(f"no groups of step {step} came within {self._timeout_s:g} s")

    def acknowledge(self, lease: ExperienceLease) -> None:
        """The groups are trained. Raises ServiceConflict if they were given again since: drop their gradient."""
        self.ask("get_experience_data", Lease(step=lease.step, budget=0, trained=(lease.number,)))

    def sample(self, token_ids: Sequence[int], seeds: Sequence[int]) -> list[Response]:
        """Sample a response for each seed, with the weight versions of its tokens; no reward, no text."""
        request = SampleResponses(prompt=pack_ids(token_ids), seeds=tuple(seeds))
        reply = self._until_room(lambda: self.ask("sample", request), "for room to sample in the service")
        return [open_response(response) for response in reply.responses]

    # weights --------------------------------------------------------------------------------------

    def weight_sync_notify(self, version: int, model: PublishedModel) -> None:
        """Give every instance this version of the model, and return once every one holds and has verified it.

        The first version may be any (a trainer that resumes), then each is one more. Raises ServiceConflict for another
        one, or while a group of an earlier step is not acknowledged; WeightSyncError if no instance can hold it.
        """
        channel = WeightChannel(self.ask)
        if self._publisher is None:
            config = self.config
            self._publisher = Publisher(
                control=channel,
                sender=channel,
                ranks=OneRank(),
                transport=partial(
                    open_transport, config.weights.transport, config.rollout.timeout_s, torch.device("cpu")
                ),
                folder=self._weights,
                dtype=DTYPES[config.model.dtype],
                bucket_bytes=config.weights.bucket_mb * 2**20,
                timeout_s=self._timeout_s,
            )
        channel.wait_until_allowed(version, self._timeout_s)
        self._publisher.publish(model, version)
        self._publisher.verify(model, version)
        self._publisher.settle()

    def await_version(self, version: int, timeout_s: float = 0.0) -> None:
        """Wait until every instance holds and has verified a version, or a later one. `timeout_s`: 0 is
        `Config.transfer_timeout_s`. Raises DeadlineError."""
        limit_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + limit_s
        while not isinstance(self.ask("await_version", AwaitVersion(version=version)), Done):
            if time.monotonic() > deadline:
                raise DeadlineError(f"weight version {version} was not published within {limit_s:g} s")

    # calls ----------------------------------------------------------------------------------------

    def ask(self, route: str, request: ControlRequest[Answer]) -> Answer:
        """Send a message to a route, and return the reply.

        Raises the error that the service answers with, DeadlineError without an answer in time, MetronomeError where
        the service is not reached.
        """
        try:
            answer = self._http.post(f"{self._url}/{route}", content=pack(request), timeout=self._timeout_s)
        except httpx.TimeoutException:
            raise DeadlineError(f"{self._url}/{route}: no answer within {self._timeout_s:g} s") from None
        except httpx.TransportError as error:
            how = f"; it {self._child.how_it_ended()}" if self._child is not None and not self._child.alive else ""
            raise MetronomeError(f"{self._url}/{route}: the service is not reached: {error}{how}") from None
        try:
            reply = read_reply(answer.content)
        except msgspec.DecodeError:
            raise MetronomeError(f"{self._url}/{route} answered {answer.status_code} with no message") from None
        if isinstance(reply, Failure):
            raise reply.error()
        return cast(Answer, reply)

    def _until_room(self, ask: Callable[[], Found], what: str, wait_s: float | None = None) -> Found:
        limit_s = self._timeout_s if wait_s is None else wait_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return ask()
            except ServiceFull as full:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"waited {limit_s:g} s {what}: {full}") from None
                time.sleep(FULL_S)


def _prompt_data(prompt: Prompt) -> PromptData:
    columns: Mapping[str, object] = prompt.columns
    return PromptData(prompt.problem, prompt.answer, pack_ids(prompt.token_ids), dict(columns))
