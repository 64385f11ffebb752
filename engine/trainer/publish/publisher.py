"""Weight sync, the trainer's side: each pipeline stage's tensors are gathered, bucket by bucket,
while others are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from engine.errors import DeadlineError, MetronomeError, TransferError, WeightSyncError
from engine.trainer.publish.background import Background
from engine.trainer.publish.send_pipeline import SendPipeline
from engine.trainer.publish.transports import Snapshots, Transport
from engine.wire.messages import (
    AbortSync,
    Answer,
    BucketInfo,
    ConnectSync,
    ControlRequest,
    Done,
    Failure,
    FinishSync,
    MeetingPlace,
    Message,
    OpenSync,
    Proceed,
    SendBucket,
    SyncOpened,
    VerifySync,
)
from engine.wire.weights.buckets import Bucket, Buffers, pack, small_first

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)

ATTEMPTS = 6
"""How often a publish begins again because an instance failed, before the run stops."""
UNDER_WAY = 3
"""Buckets in memory: one is gathered, one written or sent, one loaded by the instances."""
UNWRITTEN = "a snapshot of the weights was not written"


class PublishedModel(Protocol):
    """What is published."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """This pipeline stage's whole tensors under Hugging Face names, valid until the parameters change (see
        `settle`).

        A collective of the ranks that share them.
        """

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities (temperature 1) of the tokens after the first; [] on ranks that do not know them. A
        collective of each replica."""


class PublishRanks(Protocol):
    """What the publisher asks of the ranks (engine.trainer.rank_group)."""

    exports: bool
    """Whether this rank takes part in the export."""
    writes: bool
    """Whether it sends its pipeline stage's tensors."""
    stage: int

    def from_first(self, act: Callable[[], M]) -> M:
        """Rank 0's result of `act` on every rank."""

    def gather(self, message: S) -> list[S]:
        """Every rank's message, in rank order, on every rank."""


class ControlChannel(Protocol):
    """The way to the launcher (engine.wire.control_client)."""

    def ask(self, request: ControlRequest[Answer]) -> Answer:
        """Send a request and wait for its reply."""


class Retry(TransferError):
    """The launcher wants the publish to begin again: an instance failed."""


class RankRole(msgspec.Struct):
    """A rank's part in an export."""

    stage: int
    exports: bool


class Outcome(msgspec.Struct):
    """What came of a rank's part of an attempt."""

    retry: bool = False
    """The publish begins again."""
    failure: Failure | None = None
    stage: int = 0
    meeting: MeetingPlace | None = None
    """Where the stage's group will meet, on the rank that sends it."""


class ProbeLogprobs(msgspec.Struct):
    """Of the probe's tokens, on the ranks that know them."""

    values: list[float]


class Publisher:
    """Publishes weight versions; the launcher leads the instances (engine.launcher.weight_sync.sync).
    Built by all ranks at once."""

    def __init__(
        self,
        control: ControlChannel,
        sender: ControlChannel,
        ranks: PublishRanks,
        transport: Callable[[Snapshots], Transport],
        folder: Path,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """`sender`: the sending thread's own way to the launcher; `folder`: for snapshots, shared with the instances;
        `dtype`: of the instances' weights; `timeout_s`: of each bucket, longer than the launcher's patience with
        one."""
        self._control = control
        self._sender = sender
        self._ranks = ranks
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        roles = ranks.gather(RankRole(ranks.stage, ranks.exports))
        self._stages = 1 + max(role.stage for role in roles)
        self._alone = sum(role.exports and role.stage == ranks.stage for role in roles) == 1
        """Whether this stage's tensors can be gathered without any other rank."""
        self._snapshots = Snapshots(folder, self._stages)
        self._transport = transport(self._snapshots)
        self._buffers = Buffers(UNDER_WAY if ranks.writes else 0, timeout_s, self._transport.device)
        self._pipeline = self._make_pipeline() if ranks.writes else None
        self._probed: tuple[int, ...] = ()
        """Tokens of the probe."""
        self._sending: list[BucketInfo] = []
        """What was told of each bucket of this stage."""
        self._snapshot: Background | None = None
        """Completes the last version's snapshot."""
        self._outlived = threading.Event()
        """Set when the parameters change before `_write_snapshot` is through."""

    def _make_pipeline(self) -> SendPipeline:
        if self._transport.groups:
            steps = [self._announce] if self._alone else [self._announce, self._snapshots.write]
            counted = 1
        else:
            steps = [self._transport.write, self._announce]
            counted = 2
        return SendPipeline(steps, lambda bucket: self._buffers.give(bucket.buffer), counted, self._timeout_s)

    def publish(self, model: PublishedModel, version: int) -> float:
        """Return once every instance holds exactly this version by its checksums, and serves it; `verify` must follow.
        Returns the seconds it took (exposed sync).

        A collective of all ranks. Raises WeightSyncError and the launcher's errors on all of them.
        """
        started = time.perf_counter()
        for _ in range(ATTEMPTS):
            self._agreed(self._attempted(self._settle))
            opened = self._ranks.from_first(lambda: self._open(version))
            if self._attempt(model, version, opened):
                self._probed = opened.probe
                self._ranks.from_first(partial(self._finish, version))
                if not self._snapshot_after_sync:
                    self._complete_snapshot(version)
                return time.perf_counter() - started
        raise WeightSyncError(
            f"weight version {version} could not be sent: instances failed in each of {ATTEMPTS} attempts"
        )

    def verify(self, model: PublishedModel, version: int) -> None:
        """After `publish`, while the instances generate already: compare what they make of the version with what we do.
        No response that it sampled is given to anybody before.

        A collective of all ranks. Raises WeightSyncError and the launcher's errors on all of them.
        """
        verify = VerifySync(expected=self._probe(model, self._probed))
        self._ranks.from_first(lambda: self._control.ask(verify))
        if self._snapshot_after_sync:
            self._outlived.clear()
            self._snapshot = Background(lambda: self._write_snapshot(model, version), UNWRITTEN)

    def settle(self) -> None:
        """Before the parameters change: until the version that was published last is in its snapshot, or that is
        dropped.

        Raises nothing: what went wrong is told to all ranks by the next publish.
        """
        if self._pipeline is not None:
            self._pipeline.idle()
        if self._snapshot is not None and not self._snapshot.wait(self._timeout_s):
            self._outlived.set()

    def _settle(self) -> None:
        """Until nothing of the last version, or of a failed attempt, is under way."""
        if self._snapshot is not None:
            self._snapshot.result(self._timeout_s)
            self._snapshot = None
        if self._pipeline is not None:
            self._pipeline.restart()

    def _open(self, version: int) -> SyncOpened:
        self._snapshots.begin(version)
        return self._control.ask(OpenSync(version=version))

    def _finish(self, version: int) -> Done:
        return self._control.ask(FinishSync(version=version, snapshot=str(self._snapshots.place(version))))

    def _attempt(self, model: PublishedModel, version: int, opened: SyncOpened) -> bool:
        """Send all stages in turn. False to begin again."""
        if self._transport.groups and opened.connect and not self._connect(version, opened):
            return False
        for stage in range(self._stages):
            self._gather(model, version, stage)
            if not self._agreed(self._sent(stage)):
                return False
        return True

    # groups ---------------------------------------------------------------------------------------

    def _connect(self, version: int, opened: SyncOpened) -> bool:
        """Make the stages' groups with the instances. False to begin again."""
        meetings = self._ranks.gather(self._meeting(opened.local))
        if not _agreed(meetings):
            return False
        by_stage = sorted((one for one in meetings if one.meeting is not None), key=lambda one: one.stage)
        connect = ConnectSync(
            version=version,
            transport=self._transport.name,
            stages=tuple(one.meeting for one in by_stage if one.meeting is not None),
        )
        gather = partial(self._transport.gather, opened.world_size)
        late = "the groups of the weight transfer were not made"
        joining = Background(gather, late) if self._ranks.writes else None
        retry = self._ranks.from_first(lambda: self._control.ask(connect) if opened.world_size > 1 else Proceed()).retry
        if retry and joining is not None:
            self._transport.call_off()
        outcome = self._attempted(lambda: joining.result(self._timeout_s)) if joining is not None else Outcome()
        return self._agreed(Outcome(retry=True) if retry else outcome)

    def _meeting(self, local: bool) -> Outcome:
        outcome = Outcome(stage=self._ranks.stage)

        def meet() -> None:
            outcome.meeting = self._transport.meet(local)

        if not self._ranks.writes:
            return outcome
        failed = self._attempted(meet)
        return failed if failed.failure is not None or failed.retry else outcome

    # buckets --------------------------------------------------------------------------------------

    def _gather(self, model: PublishedModel, version: int, stage: int) -> None:
        """Hand the stage's buckets to the pipeline as they fill. All of its ranks go through all of its tensors."""
        if self._ranks.stage != stage or not self._ranks.exports:
            return
        tensors = model.tensors()
        if self._pipeline is None:
            for _ in tensors:
                pass  # gives its shards to the rank that sends
            return
        self._sending = []
        for bucket in self._packed(tensors):
            info = BucketInfo(
                transport=self._transport.name, version=version, stage=stage, bucket=bucket.number, **bucket.wire()
            )
            if self._transport.groups:  # the others' write is a step
                self._transport.write(bucket, info)
            self._sending.append(info)
            self._pipeline.put(bucket, info)

    def _packed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        return pack(small_first(tensors, self._bucket_bytes), self._dtype, self._bucket_bytes, self._buffers)

    def _sent(self, stage: int) -> Outcome:
        """What came of sending the stage."""
        pipeline = self._pipeline
        if self._ranks.stage != stage or pipeline is None:
            return Outcome()
        outcome = self._attempted(pipeline.wait)
        if outcome != Outcome():
            self._transport.call_off()
        return outcome

    def _announce(self, bucket: Bucket, info: BucketInfo) -> None:
        """Send a bucket while the launcher has all instances receive it."""
        sent = self._transport.send(bucket)
        if self._sender.ask(SendBucket(info=info)).retry:
            raise Retry("an instance failed")
        try:
            sent.wait()
        except (TransferError, DeadlineError) as error:
            self._sender.ask(AbortSync(version=info.version, reason=f"{error} ({info.title})"))
            raise Retry(str(error)) from None

    @property
    def _snapshot_after_sync(self) -> bool:
        """Whether the snapshot is written after the sync, which then has cores and memory to itself: where it needs no
        other rank. Else each bucket is written once it is sent."""
        return self._alone and self._transport.groups and self._pipeline is not None

    def _write_snapshot(self, model: PublishedModel, version: int) -> None:
        """The buckets that were sent, gathered again: the parameters wait for it (`settle`)."""
        for bucket, info in zip(self._packed(model.tensors()), self._sending, strict=True):
            self._snapshots.write(bucket, info)
            self._buffers.give(bucket.buffer)
            if self._outlived.is_set():
                print(
                    f"the snapshot of weight version {version} is dropped: it took more than {self._timeout_s:g} s",
                    flush=True,
                )
                return
        self._snapshots.stage_done(version, self._ranks.stage)

    def _complete_snapshot(self, version: int) -> None:
        """In the background, once its last bucket is written
        (and no instance reads it any more where it was staged)."""
        pipeline = self._pipeline
        stage = self._ranks.stage
        if pipeline is None:
            return

        def complete() -> None:
            pipeline.drain()
            self._snapshots.stage_done(version, stage)

        self._snapshot = Background(complete, UNWRITTEN)

    def _probe(self, model: PublishedModel, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """On all ranks, what the last stage's know."""
        if not token_ids:
            return ()
        gathered = self._ranks.gather(ProbeLogprobs(model.probe(list(token_ids))))
        return next((tuple(one.values) for one in gathered if one.values), ())

    # agreement ------------------------------------------------------------------------------------

    def _attempted(self, act: Callable[[], None]) -> Outcome:
        """`act`, and its failure as a message."""
        try:
            act()
        except TransferError:
            return Outcome(retry=True)
        except MetronomeError as error:
            return Outcome(failure=Failure.of(error))
        return Outcome()

    def _agreed(self, outcome: Outcome) -> bool:
        """Whether all ranks were successful; False to begin again. Raises a rank's error on all."""
        return _agreed(self._ranks.gather(outcome))


def _agreed(outcomes: list[Outcome]) -> bool:
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure.error()
    return not any(outcome.retry for outcome in outcomes)
