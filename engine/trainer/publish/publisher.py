"""Weight sync, the trainer's side: each pipeline stage's tensors are gathered, bucket by bucket,
while others are sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine import errors
from engine.errors import DeadlineError, MetronomeError, TransferError, WeightSyncError
from engine.trainer.publish.background import Background
from engine.trainer.publish.send_pipeline import SendPipeline
from engine.trainer.publish.transports import Snapshots, Transport
from engine.wire.weights.buckets import Bucket, Buffers, pack, small_first, title

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

    def from_first(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's result of `act` on every rank."""

    def gather(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's message, in rank order, on every rank."""


class ControlChannel(Protocol):
    """The way to the launcher (engine.wire.control_client)."""

    def ask(self, operation: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """Send a request and wait for its reply."""


class Retry(TransferError):
    """The launcher wants the publish to begin again: an instance failed."""


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
        gathered = ranks.gather({"stage": ranks.stage, "exports": ranks.exports})
        self._stages = 1 + max(one["stage"] for one in gathered)
        self._alone = sum(one["exports"] and one["stage"] == ranks.stage for one in gathered) == 1
        """Whether this stage's tensors can be gathered without any other rank."""
        self._snapshots = Snapshots(folder, self._stages)
        self._transport = transport(self._snapshots)
        self._pipeline = self._make_pipeline() if ranks.writes else None
        self._probed: list[int] = []
        """Tokens of the probe."""
        self._sending: list[dict[str, Any]] = []
        """What was told of each bucket of this stage."""
        self._snapshot: Background | None = None
        """Completes the last version's snapshot."""
        self._outlived = threading.Event()
        """Set when the parameters change before `_write_snapshot` is through."""

    def _make_pipeline(self) -> SendPipeline:
        self._buffers = Buffers(UNDER_WAY, self._timeout_s, self._transport.device)
        if self._transport.groups:
            steps = [self._announce] if self._alone else [self._announce, self._snapshots.write]
            counted = 1
        else:
            steps = [self._write, self._announce]
            counted = 2
        return SendPipeline(steps, lambda bucket: self._buffers.give(bucket.buffer), counted, self._timeout_s)

    def publish(self, model: PublishedModel, version: int) -> float:
        """Return once every instance holds exactly this version by its checksums, and serves it; `verify` must follow.
        Returns the seconds it took (exposed sync).

        A collective of all ranks. Raises WeightSyncError and the launcher's errors on all of them.
        """
        started = time.perf_counter()
        for _ in range(ATTEMPTS):
            self._agreed(self._caught(self._settle))
            opened = self._ranks.from_first(lambda: self._open(version))
            if self._attempt(model, version, opened):
                self._probed = opened["probe"]
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
        expected = self._probe(model, self._probed)
        self._ranks.from_first(lambda: self._control.ask("sync_verify", version=version, expected=expected))
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

    def _open(self, version: int) -> dict[str, Any]:
        self._snapshots.begin(version)
        return self._control.ask("sync_open", version=version)

    def _finish(self, version: int) -> dict[str, Any]:
        return self._control.ask("sync_finish", version=version, snapshot=str(self._snapshots.place(version)))

    def _attempt(self, model: PublishedModel, version: int, opened: dict[str, Any]) -> bool:
        """Send all stages in turn. False to begin again."""
        if self._transport.groups and opened["connect"] and not self._connect(version, opened):
            return False
        for stage in range(self._stages):
            self._gather(model, version, stage)
            if not self._agreed(self._sent(version, stage)):
                return False
        return True

    # groups ---------------------------------------------------------------------------------------

    def _connect(self, version: int, opened: dict[str, Any]) -> bool:
        """Make the stages' groups with the instances. False to begin again."""
        sends = self._ranks.writes
        meeting = self._caught(lambda: {"at": self._transport.meet(opened["local"])} if sends else {})
        gathered = self._ranks.gather({"stage": self._ranks.stage, **meeting})
        if not self._all_agreed(gathered):
            return False
        stages = [one["at"] for one in sorted((one for one in gathered if "at" in one), key=lambda one: one["stage"])]
        gather = partial(self._transport.gather, opened["world_size"])
        joining = Background(gather, "the groups of the weight transfer were not made") if sends else None
        name = self._transport.name
        reply = self._ranks.from_first(
            lambda: (
                self._control.ask("sync_connect", version=version, stages=stages, transport=name)
                if opened["world_size"] > 1
                else {}
            )
        )
        if reply.get("retry") and sends:
            self._transport.call_off()
        outcome = self._caught(lambda: joining.result(self._timeout_s) if joining is not None else None)
        return self._agreed({"retry": True} if reply.get("retry") else outcome)

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
            info = {
                "transport": self._transport.name,
                "version": version,
                "stage": stage,
                "bucket": bucket.number,
                **bucket.wire(),
            }
            info |= self._transport.write(bucket, info) if self._transport.groups else {}  # the others' write is a step
            self._sending.append(info)
            self._pipeline.put(bucket, info)

    def _packed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
        return pack(small_first(tensors, self._bucket_bytes), self._dtype, self._bucket_bytes, self._buffers)

    def _sent(self, version: int, stage: int) -> dict[str, Any]:
        """What came of sending the stage: {} or {"retry"} or an error."""
        pipeline = self._pipeline
        if self._ranks.stage != stage or pipeline is None:
            return {}
        outcome = self._caught(pipeline.wait)
        if outcome:
            self._transport.call_off()
        return outcome

    def _write(self, bucket: Bucket, info: dict[str, Any]) -> None:
        info |= self._transport.write(bucket, info)

    def _announce(self, bucket: Bucket, info: dict[str, Any]) -> None:
        """Send a bucket while the launcher has all instances receive it."""
        sent = self._transport.send(bucket)
        if self._sender.ask("sync_bucket", info=info).get("retry"):
            raise Retry("an instance failed")
        try:
            sent.wait()
        except (TransferError, DeadlineError) as error:
            self._sender.ask("sync_abort", version=info["version"], reason=f"{error} ({title(info)})")
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

    def _probe(self, model: PublishedModel, token_ids: list[int]) -> list[float]:
        """On all ranks, what the last stage's know."""
        if not token_ids:
            return []
        gathered = self._ranks.gather({"probe": model.probe(token_ids)})
        return next((one["probe"] for one in gathered if one["probe"]), [])

    # agreement ------------------------------------------------------------------------------------

    def _caught(self, act: Callable[[], Any]) -> dict[str, Any]:
        """The result of `act`, or its failure as a message."""
        try:
            return act() or {}
        except TransferError:
            return {"retry": True}
        except MetronomeError as error:
            return {"error": type(error).__name__, "message": str(error)}

    def _agreed(self, outcome: dict[str, Any]) -> bool:
        """Whether all ranks were successful; False to begin again. Raises a rank's error on all."""
        return self._all_agreed(self._ranks.gather(outcome))

    def _all_agreed(self, gathered: list[dict[str, Any]]) -> bool:
        for one in gathered:
            if "error" in one:
                raise getattr(errors, one["error"], MetronomeError)(one["message"])
        return not any(one.get("retry") for one in gathered)
