"""The client of the plane, with the names of AsyncFlow §5.1. A trainer, a stage or your own program uses a run's
rollout instances, its rewards and its weight sync through it (docs/service.md)."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from engine.client.connection import Connection
from engine.client.publish.publisher import PublishedModel, Publisher
from engine.client.ranks import Ranks
from engine.config import Config
from engine.errors import BadInput, DeadlineError, MetronomeError, ServiceFull, WeightsLost
from engine.run.commands import service_command
from engine.run.folder import dump_config
from engine.run.process import Child
from engine.types import Group, Prompt, Response
from engine.wire.access_token import access_token, folder_token
from engine.wire.address import ADDRESS_FILE, orchestrator_address, split_address
from engine.wire.columns import SCORES, Row, open_group, open_response, pack_ids, pack_values
from engine.wire.messages import (
    TRAIN,
    Answer,
    AwaitVersion,
    Done,
    EndOfRun,
    EndOfStep,
    InitEngines,
    Lease,
    MayPublish,
    PromptData,
    PublishAgain,
    PutPrompts,
    Request,
    SampleResponses,
    Window,
    WriteColumns,
    Written,
)

FULL_S = 0.2
"""Seconds to wait before resending a request that the service refused because it was full."""
START_S = 300.0
"""Seconds to wait for the engines of a run."""
LOOK_S = 0.1
"""Seconds between two checks for the address of a service that is starting."""

Found = TypeVar("Found")


class ExperienceLease:
    """Rows leased for a stage, which acknowledges them or writes columns for them. `groups` opens them."""

    def __init__(self, window: Window, stage: str, reward_weights: Mapping[str, float]) -> None:
        self.number = window.lease
        self.stage = stage
        self.step = window.step
        self.rows: tuple[Row, ...] = window.rows
        self.lease_s = window.lease_s
        """Seconds after which the rows may be given to another program; None: never within the step."""
        self.deliveries = window.deliveries
        """How often these rows have been leased, including this time."""
        self._batch = window.batch
        self._weights = reward_weights

    @property
    def groups(self) -> tuple[Group, ...]:
        """The rows as groups, if the column `responses` was requested. Raises TransferError for damaged bytes."""
        weights = self._weights if self.stage == TRAIN else {}
        return tuple(open_group(row, self._batch, reward_weights=weights) for row in self.rows)


class ServiceClient:
    """A client of a running plane. Several threads may call its methods, but only one of them may publish weights."""

    def __init__(
        self, address: str, child: Child | None = None, timeout_s: float = START_S, token: str | None = None
    ) -> None:
        """`address`: host:port. `child`: the service's process if this program has started it. `timeout_s`: seconds to
        wait for the engines. `token`: access token; None takes METRONOME_TOKEN."""
        self._child = child
        self.connection = Connection(f"http://{address}", token or access_token(), "this program", timeout_s)
        ready = self.ask(InitEngines())
        self.config: Config = Config.model_validate_json(ready.config)
        """The plane's recipe."""
        self.version: int | None = ready.version
        """The weight version that was published last when this object was created; None if there was none."""
        self._weights = Path(ready.weights)
        self._publisher: Publisher | None = None
        self._published: int | None = None
        """The weight version that this object has published last."""
        self._lost = False
        """Whether instances lack this version, as the service has said."""
        self.connection.timeout_s = self._timeout_s = self.config.transfer_timeout_s

    @classmethod
    def init_engines(cls, engines: Config | Path | str) -> ServiceClient:
        """Start the engines of a recipe (its `model.path` must be a Hugging Face folder), or use those of a running
        plane, given by its run folder or its host:port. Engines that are started here end with `close`, and with this
        process.

        Raises BadInput for an invalid address or a recipe that the service does not accept, and DeadlineError if the
        engines are not ready within rollout.timeout_s.
        """
        if isinstance(engines, Config):
            return cls._start(engines)
        path = Path(engines).expanduser()
        if path.is_dir():
            if not (path / ADDRESS_FILE).exists():
                raise BadInput(
                    f"{path}: no service or run is running here ({ADDRESS_FILE} is missing); `metronome service` or "
                    "`metronome train` starts one"
                )
            return cls._of_folder(path)
        split_address(str(engines), "the service's address")
        return cls(str(engines))

    @classmethod
    def _of_folder(cls, folder: Path, child: Child | None = None, timeout_s: float = START_S) -> ServiceClient:
        return cls(orchestrator_address(str(folder)), child, timeout_s, folder_token(str(folder)))

    @classmethod
    def _start(cls, config: Config) -> ServiceClient:
        address = config.folder / ADDRESS_FILE
        address.unlink(missing_ok=True)
        log = config.folder / "logs" / "service.log"
        with tempfile.TemporaryDirectory(prefix="metronome-") as scratch:
            recipe = Path(scratch) / "recipe.toml"
            dump_config(config, recipe)
            child = Child("service", service_command(recipe), log)
            try:
                deadline = time.monotonic() + config.rollout.timeout_s
                while not address.exists():
                    if child.refused_input:
                        raise BadInput(f"the service {child.how_it_ended()}")
                    child.check_alive()
                    if time.monotonic() > deadline:
                        raise DeadlineError(f"the service did not start within {config.rollout.timeout_s:g} s: {log}")
                    time.sleep(LOOK_S)
                return cls._of_folder(config.folder, child, config.rollout.timeout_s)
            except BaseException:
                child.stop()
                raise

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect from the plane, and stop the engines if this object has started them."""
        self.connection.close()
        if self._child is not None:
            self._child.stop(grace_s=10.0)

    # experience -----------------------------------------------------------------------------------

    def put_prompts_data(self, step: int, prompts: Sequence[Prompt] | None = None) -> bool:
        """Start a step: have responses to its prompts sampled and scored. `prompts` None: the next ones of the recipe's
        data.

        Return False if the same prompts were put already. The reward sees the problem, answer and columns of your own
        prompts. Their sampling seeds depend on the step. Raises ServiceConflict if the step has other prompts or is not
        due.
        """
        data = None if prompts is None else tuple(map(_prompt_data, prompts))
        request = PutPrompts(step=step, prompts=data)
        what = f"for room in the service for the prompts of step {step}"
        return self._until_room(lambda: self.ask(request), what).new

    def get_experience_data(
        self,
        step: int | None,
        consumer: str = "trainer",
        budget: int = 0,
        trained: ExperienceLease | None = None,
        stage: str = TRAIN,
        columns: Sequence[str] = (),
    ) -> ExperienceLease | None:
        """Wait for rows of a step for a stage. Return None once the stage has finished all of them.

        `step` None: rows of any step, until the run's last step is trained. `budget`: maximum number of tokens; 0: the
        recipe's window. At least one row is always given. `trained`: a lease that the same request acknowledges first.
        `columns`: a subset of the columns that the stage needs; empty: all.

        A lease that is not acknowledged, or written, within its `lease_s` is given again, so delivery is at least once.
        Raises DeadlineError if no rows arrive within `Config.transfer_timeout_s`, what `acknowledge` raises, and
        WeightsLost if an instance waits for the step's weight version: publish it again (`weight_sync_notify`), then
        ask again. No lease of the step is held then.
        """
        budget = budget or self._budget(stage)
        if stage == TRAIN and SCORES in columns:
            columns = [*columns, *self.config.reward_weights]  # they are part of the reward
        done = () if trained is None else (trained.number,)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            reply = self.ask(
                Lease(budget=budget, stage=stage, step=step, done=done, consumer=consumer, columns=tuple(columns))
            )
            done = ()
            if isinstance(reply, EndOfStep | EndOfRun):
                return None
            if isinstance(reply, PublishAgain):
                self._lost = True
                raise WeightsLost(
                    f"an instance waits for weight version {reply.version} while no row does: publish this version "
                    "again (weight_sync_notify), then ask again"
                )
            if isinstance(reply, Window):
                return ExperienceLease(reply, stage, self.config.reward_weights)
        of = f"step {step}" if step is not None else "any step"
        raise DeadlineError(f"no groups of {of} arrived for the stage {stage!r} within {self._timeout_s:g} s")

    def _budget(self, stage: str) -> int:
        own = self.config.stages.get(stage)
        return (own.budget if own is not None else 0) or self.config.window_tokens

    def acknowledge(self, lease: ExperienceLease) -> None:
        """Report that the groups are trained. Raises ServiceConflict if they have been leased again: drop their
        gradient."""
        self.ask(Lease(budget=0, stage=lease.stage, done=(lease.number,)))

    def rows(self, stage: str, columns: Sequence[str] = (), consumer: str = "") -> Iterator[ExperienceLease]:
        """Yield the windows of your own stage, of all steps, until the run's last step is trained. Answer each with
        `write`."""
        name = consumer or stage
        while (lease := self.get_experience_data(None, name, stage=stage, columns=columns)) is not None:
            yield lease

    def write(self, lease: ExperienceLease, columns: Mapping[str, Sequence[Any]]) -> bool:
        """Write the columns of a stage for the rows of a lease. `columns`: by name, an array of numbers for each row,
        in the order of the rows, with one number for each response [G] or for each token of the concatenated responses.

        Return False if the same columns are already there. Raises BadInput for another shape or columns that the stage
        does not give, and ServiceConflict if a row has other values or has been given to another program.
        """
        rows = tuple(
            Written(row.index, tuple(pack_values(name, np.asarray(values[at])) for name, values in columns.items()))
            for at, row in enumerate(lease.rows)
        )
        return self.ask(WriteColumns(stage=lease.stage, lease=lease.number, rows=rows)).new

    def sample(self, token_ids: Sequence[int], seeds: Sequence[int]) -> list[Response]:
        """Sample a response for each seed. Responses have the weight versions of their tokens, but no reward and no
        text. Raises WeightsLost if no instance of a service holds weights: publish the last version again."""
        request = SampleResponses(prompt=pack_ids(token_ids), seeds=tuple(seeds))
        reply = self._until_room(lambda: self.ask(request), "for room to sample in the service")
        return [open_response(response) for response in reply.responses]

    # weights --------------------------------------------------------------------------------------

    def publisher(self, ranks: Ranks | None = None, device: torch.device | None = None) -> Publisher:
        """Create a publisher of weights for a trainer with these ranks, whose model is on `device`. All ranks must call
        this together."""
        return Publisher.of(
            config=self.config,
            connection=self.connection,
            ranks=ranks or Ranks(),
            folder=self._weights,
            device=device or torch.device("cpu"),
        )

    def weight_sync_notify(self, version: int, model: PublishedModel) -> None:
        """Publish a version of the model, and return once every instance holds and has verified it. With weights.staged
        in a mode that samples ahead, return once it is on its way (`await_version` waits for the rest).

        The first version may be any (a trainer that resumes); each later one is one more. After WeightsLost, the last
        version goes to the instances that lack it, and the step goes on. Raises ServiceConflict for another version, or
        while a group of an earlier step is not acknowledged; WeightSyncError if no instance can hold the version.
        """
        self._publisher = self._publisher or self.publisher()
        again = self._lost and version == self._published
        deadline = time.monotonic() + self._timeout_s
        while not again and not self.ask(MayPublish(version=version)).now:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"weight version {version} could not be published within {self._timeout_s:g} s: batches in flight "
                    "are still being sampled"
                )
        self._publisher.publish(model, version, again)
        self._publisher.verify(model, version)
        self._published = version
        self._lost = False

    def await_version(self, version: int, timeout_s: float = 0.0) -> None:
        """Wait until every instance holds and has verified a version, or a later one. `timeout_s`: 0 means
        `Config.transfer_timeout_s`. Raises DeadlineError."""
        limit_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + limit_s
        while not isinstance(self.ask(AwaitVersion(version=version)), Done):
            if time.monotonic() > deadline:
                raise DeadlineError(f"not every instance held weight version {version} within {limit_s:g} s")

    # calls ----------------------------------------------------------------------------------------

    def ask(self, request: Request[Answer]) -> Answer:
        """Send a message and return the reply. Raises what `Connection.ask` raises."""
        try:
            return self.connection.ask(request)
        except WeightsLost:
            self._lost = True
            raise
        except MetronomeError as error:
            if type(error) is MetronomeError and self._child is not None and not self._child.alive:
                raise MetronomeError(f"{error}; the service {self._child.how_it_ended()}") from None
            raise

    def _until_room(self, ask: Callable[[], Found], what: str) -> Found:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask()
            except ServiceFull as full:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"waited {self._timeout_s:g} s {what}: {full}") from None
                time.sleep(FULL_S)


def _prompt_data(prompt: Prompt) -> PromptData:
    try:
        columns = json.dumps(dict(prompt.columns), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadInput(f"a prompt's columns travel as JSON: {error}") from None
    return PromptData(
        problem=prompt.problem,
        answer=prompt.answer,
        token_ids=pack_ids(prompt.token_ids),
        columns=columns,
        text=prompt.text,
    )
