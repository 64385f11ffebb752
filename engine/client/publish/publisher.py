"""The trainer's side of a weight sync. Each pipeline stage gathers its tensors bucket by bucket. A pipeline of threads
sends one bucket and writes the next one, while the one after it is gathered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engine.client.connection import Connection
from engine.client.publish.transports import Transport, address_of, open_transport
from engine.client.ranks import Ranks
from engine.config import Config
from engine.errors import DeadlineError, MetronomeError, TransferError, WeightSyncError
from engine.run.memory import BUCKETS
from engine.run.process import in_thread
from engine.wire.messages import (
    AbortSync,
    BucketInfo,
    ConnectSync,
    Failure,
    FinishSync,
    MeetingPlace,
    OpenSync,
    Proceed,
    SendBucket,
    SyncOpened,
    VerifySync,
)
from engine.wire.weights.buckets import DTYPES, Bucket, Buffers, bucket_span, pack_buckets

Step = Callable[[Bucket, BucketInfo], object]


class SendPipeline:
    """Takes buckets through steps, in order: each step has one bucket at a time. A bucket is released after the last.

    After an error the steps skip all buckets until `restart_steps`.
    """

    def __init__(self, steps: Sequence[Step], release: Callable[[Bucket], None], timeout_s: float) -> None:
        """`release`: frees a bucket's memory."""
        self._steps = steps
        self._release = release
        self._timeout_s = timeout_s
        self._last: list[Future[None]] = []
        """The steps of the last bucket."""
        self._failed = False

    def put_bucket(self, bucket: Bucket, info: BucketInfo) -> None:
        """Begin with a bucket, once the last one has passed the first step."""
        own: list[Future[None]] = []
        for number in range(len(self._steps)):
            after = [*own[-1:], *self._last[number : number + 1]]
            run = partial(self._run_step, number=number, after=after, bucket=bucket, info=info)
            own.append(in_thread(f"send-weights-{number}", run))
        self._last = own

    def _run_step(self, number: int, after: list[Future[None]], bucket: Bucket, info: BucketInfo) -> None:
        ended_well = False
        try:
            wait(after)  # of all, so that none is under way once the last bucket has ended
            for earlier in after:
                earlier.result()
            if not self._failed:
                self._steps[number](bucket, info)
            ended_well = True
        finally:
            self._failed = self._failed or not ended_well
            if number + 1 == len(self._steps):
                self._release(bucket)

    def wait_for_steps(self) -> None:
        """Wait until all buckets have passed all steps. Raises the error of a step, or DeadlineError."""
        self._wait()
        for step in self._last:
            step.result()

    def restart_steps(self) -> None:
        """Wait until no bucket is in progress, and clear the error of a step. Raises DeadlineError."""
        self._wait()
        self._last = []
        self._failed = False

    def _wait(self) -> None:
        if wait(self._last, self._timeout_s).not_done:
            raise DeadlineError(f"a bucket of weights was not sent within {self._timeout_s:g} s")


ATTEMPTS = 6
"""Attempts of a publish. The run stops if an instance fails in each of them."""


class PublishedModel(Protocol):
    """The model whose weights are published (engine.model.tri_model)."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield this pipeline stage's whole tensors under Hugging Face names. They are valid until the parameters
        change.

        A collective of the ranks that share them.
        """

    def probe(self, token_ids: list[int]) -> list[float]:
        """Return the log-probabilities (temperature 1) of all tokens but the first; [] on all but the last pipeline
        stage.

        A collective of each replica.
        """


class Retry(TransferError):
    """An instance failed, so the orchestrator asks to repeat the publish."""


class Outcome(msgspec.Struct):
    """The result of a rank's part of an attempt. It succeeded if neither `retry` nor `failure` is set."""

    retry: bool = False
    """Whether the publish must be repeated."""
    failure: Failure | None = None
    stage: int = 0
    """The rank's pipeline stage."""
    meeting: MeetingPlace | None = None
    """Where the stage's communication group meets; set by the rank that sends the stage."""


class ProbeLogprobs(msgspec.Struct):
    """A rank's log-probabilities of the probe's tokens."""

    values: list[float]
    """Empty on all but the last pipeline stage."""


class Publisher:
    """Publishes weight versions. The orchestrator directs the instances (engine.orchestrator.publish).

    All ranks must construct it together.
    """

    def __init__(
        self,
        connection: Connection,
        ranks: Ranks,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """`dtype`: dtype of the instances' weights. `timeout_s`: deadline of a bucket, longer than the
        orchestrator's."""
        self._connection = connection
        self._ranks = ranks
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._stages = 1 + max(one.stage for one in ranks.gather(Outcome(stage=ranks.stage)))
        self._transport = transport
        self._buffers = Buffers(BUCKETS if ranks.writes else 0, timeout_s, self._transport.device)
        self._pipeline = self._make_pipeline() if ranks.writes else None
        self._probed: tuple[int, ...] = ()
        """Token ids of the probe, from the orchestrator."""
        self._sent_bytes = 0

    @classmethod
    def of(cls, config: Config, connection: Connection, ranks: Ranks, folder: Path, device: torch.device) -> Publisher:
        """Create the publisher of a run from its recipe. `folder`: where the weights lie with transport "file".
        `device`: device of the model."""
        weights = config.weights
        return cls(
            connection=connection,
            ranks=ranks,
            transport=open_transport(
                weights.transport, config.rollout.timeout_s, device, folder, address=address_of(config)
            ),
            dtype=DTYPES[config.model.dtype],
            bucket_bytes=weights.bucket_bytes,
            timeout_s=config.transfer_timeout_s,
        )

    def _make_pipeline(self) -> SendPipeline:
        steps = [self._transport.write, self._send_bucket]
        return SendPipeline(steps, lambda bucket: self._buffers.give_back(bucket.buffer), self._timeout_s)

    def publish(self, model: PublishedModel, version: int, again: bool = False) -> float:
        """Give every instance exactly this version; `verify` must follow. Return the seconds that it took. `again`: the
        last version goes again to the instances that lack it (`messages.PublishAgain`).

        The instances then serve the version. If they swap in staged weights in the background, they hold the version
        and serve it later. A collective of all ranks. Raises WeightSyncError and the orchestrator's errors on all of
        them.
        """
        started = time.perf_counter()
        for _ in range(ATTEMPTS):
            self._all_succeeded(self._outcome_of(self._end_last_attempt))
            opened = self._ranks.from_first(lambda: self._connection.ask(OpenSync(version=version, again=again)))
            if self._send_stages(model, version, opened):
                self._probed = opened.probe
                self._ranks.from_first(lambda: self._connection.ask(FinishSync(version=version)))
                return time.perf_counter() - started
        raise WeightSyncError(
            f"weight version {version} could not be sent: instances failed in each of {ATTEMPTS} attempts"
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that this rank sent in the last publish."""
        return self._sent_bytes

    def verify(self, model: PublishedModel, version: int) -> None:
        """Have the orchestrator compare the instances' log-probabilities of a few fixed tokens with the policy's.

        Call it after `publish`. The instances sample at the same time, but the orchestrator holds an instance's
        responses back until its comparison has passed. A collective of all ranks. Raises WeightSyncError and the
        orchestrator's errors on all ranks.
        """
        verify = VerifySync(expected=self._probe(model, self._probed))
        self._ranks.from_first(lambda: self._connection.ask(verify))

    def _end_last_attempt(self) -> None:
        if self._pipeline is not None:
            self._pipeline.restart_steps()

    def _send_stages(self, model: PublishedModel, version: int, opened: SyncOpened) -> bool:
        """Send all stages, one after the other. Return False if the publish must be repeated."""
        if self._transport.groups and opened.connect and not self._connect(version, opened):
            return False
        for stage in range(self._stages):
            self._gather_buckets(model, version, stage)
            if not self._all_succeeded(self._wait_until_sent(stage)):
                return False
        return True

    # groups ---------------------------------------------------------------------------------------

    def _connect(self, version: int, opened: SyncOpened) -> bool:
        """Create the communication groups of the stages with the instances. Return False if the publish must be
        repeated."""
        meet = partial(self._transport.meet, opened.local)
        outcomes = self._ranks.gather(self._outcome_of(meet) if self._ranks.writes else Outcome())
        if not _all_succeeded(outcomes):
            return False
        meetings = {one.stage: one.meeting for one in outcomes if one.meeting is not None}
        stages = tuple(meetings[stage] for stage in sorted(meetings))
        connect = ConnectSync(version=version, transport=self._transport.name, stages=stages)
        joining = (
            in_thread("weights", partial(self._transport.gather, opened.world_size)) if self._ranks.writes else None
        )
        retry = self._ranks.from_first(
            lambda: self._connection.ask(connect) if opened.world_size > 1 else Proceed()
        ).retry
        if retry and joining is not None:
            self._transport.call_off()
        outcome = self._outcome_of(lambda: self._wait_for_groups(joining)) if joining is not None else Outcome()
        return self._all_succeeded(Outcome(retry=True) if retry else outcome)

    def _wait_for_groups(self, joining: Future[None]) -> None:
        if not wait([joining], self._timeout_s).done:
            raise DeadlineError(f"the groups of the weight transfer were not made within {self._timeout_s:g} s")
        joining.result()

    # buckets --------------------------------------------------------------------------------------

    def _gather_buckets(self, model: PublishedModel, version: int, stage: int) -> None:
        """Hand each full bucket of the stage to the send pipeline. A collective of the stage's exporting ranks."""
        if self._ranks.stage != stage or not self._ranks.exports:
            return
        tensors = model.tensors()
        if self._pipeline is None:
            for _ in tensors:
                pass  # gives its shards to the rank that sends
            return
        self._sent_bytes = 0
        for bucket in pack_buckets(tensors, self._dtype, self._bucket_bytes, self._buffers):
            info = BucketInfo(
                transport=self._transport.name, version=version, stage=stage, bucket=bucket.number, **bucket.wire()
            )
            self._sent_bytes += bucket_span(bucket.specs)
            self._pipeline.put_bucket(bucket, info)

    def _wait_until_sent(self, stage: int) -> Outcome:
        """Wait until this rank has sent the stage. Return the result."""
        pipeline = self._pipeline
        if self._ranks.stage != stage or pipeline is None:
            return Outcome()
        outcome = self._outcome_of(pipeline.wait_for_steps)
        if outcome.retry or outcome.failure is not None:
            self._transport.call_off()
        return outcome

    def _send_bucket(self, bucket: Bucket, info: BucketInfo) -> None:
        """Send a bucket while the orchestrator has all instances receive it. Raises Retry if that fails."""
        sent = self._transport.send(bucket)
        if self._connection.ask(SendBucket(info=info)).retry:
            raise Retry("an instance failed")
        try:
            if sent is not None:
                sent.wait()
        except (TransferError, DeadlineError) as error:
            self._connection.ask(AbortSync(version=info.version, reason=f"{error} ({info.title})"))
            raise Retry(str(error)) from None

    def _probe(self, model: PublishedModel, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the policy's log-probabilities of the probe on all ranks; () without a probe."""
        if not token_ids:
            return ()
        gathered = self._ranks.gather(ProbeLogprobs(model.probe(list(token_ids))))
        return next((tuple(one.values) for one in gathered if one.values), ())

    # agreement ------------------------------------------------------------------------------------

    def _outcome_of(self, act: Callable[[], MeetingPlace | None]) -> Outcome:
        """Call `act` and return the outcome: its result, or its MetronomeError if it failed."""
        try:
            return Outcome(stage=self._ranks.stage, meeting=act())
        except TransferError:
            return Outcome(retry=True)
        except MetronomeError as error:
            return Outcome(failure=Failure.of(error))

    def _all_succeeded(self, outcome: Outcome) -> bool:
        """Return whether all ranks succeeded; False if the publish must be repeated. Raises a rank's error on all of
        them."""
        return _all_succeeded(self._ranks.gather(outcome))


def _all_succeeded(outcomes: list[Outcome]) -> bool:
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure.error()
    return not any(outcome.retry for outcome in outcomes)
