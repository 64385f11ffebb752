"""The calls of a weight update on one instance, in the order that the protocol requires, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from engine.errors import MetronomeError, WeightSyncError
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.instance_client import InstanceFault, Refused
from engine.orchestrator.publish.probe import Probe
from engine.wire.messages import BucketInfo
from engine.wire.rollout_messages import (
    BaseWeights,
    BeginUpdate,
    FinishUpdate,
    GetHealth,
    GetLoad,
    InstanceRequest,
    Pause,
    Resume,
    StagedWeights,
    Update,
)

Reply = TypeVar("Reply")
SELF_TEST = "self-test"
PERTURBED_VERSION = 2**40
"""Version named by an instance with perturbed weights; no step accepts it."""
MOVED = 0.01
"""At least one log-probability must move by more than this when the weights are perturbed."""


class UpdateCalls:
    """Calls to one instance. They raise what InstanceClient.call raises, adding `during`, for example "weight version
    3"."""

    def __init__(self, probe: Probe | None, timeout_s: float) -> None:
        """`timeout_s`: deadline of every call."""
        self.probe = probe
        self.timeout_s = timeout_s
        self._noise: float | None = None
        """The largest difference between instances and trainer under the first version that was compared. Correct
        engines differ by this much."""
        self._base: dict[Instance, list[float]] = {}
        """The log-probabilities of the probe under the weights that an instance was started from, kept until its first
        comparison."""

    async def begin_update(self, instance: Instance, during: str, abort: bool = False) -> None:
        """Pause the instance, wait until no request is running, and begin an update, or begin it again. `abort`
        interrupts running requests."""
        await self.send_request(instance, BeginUpdate("abort" if abort else "wait"), during)

    async def update_weights(
        self, instance: Instance, weights: BucketInfo | StagedWeights | BaseWeights, during: str
    ) -> None:
        """Have the instance receive and load weights."""
        await self.send_request(instance, Update(weights), during)

    async def finish_update(self, instance: Instance, version: int, during: str) -> list[float]:
        """Complete the update: the instance names it `version` and serves it. Return its log-probabilities of the
        probe. Raises WeightSyncError, naming the instance, if it holds another version."""
        probe = () if self.probe is None else self.probe.token_ids
        updated = await self.send_request(instance, FinishUpdate(version, probe), during)
        if updated.weight_version != version:
            raise WeightSyncError(
                f"{instance.name}: it holds weight version {updated.weight_version} after an update to version "
                f"{version}"
            )
        if len(updated.logprobs) != max(0, len(probe) - 1):
            raise InstanceFault(
                f"{instance.name}: it answered {len(updated.logprobs)} log-probabilities of the {len(probe)} tokens of "
                f"the probe ({during})"
            )
        return updated.logprobs

    def compare_probe(
        self, instance: Instance, version: int, found: Sequence[float], expected: Sequence[float] | None
    ) -> float:
        """Return the difference between the instance's (`found`) and the trainer's log-probabilities of the probe under
        the version; 0 if there is nothing to compare. Raises WeightSyncError naming the instance if the difference
        exceeds the limit."""
        if self.probe is None or not expected:
            return 0.0
        apart = self.probe.difference(expected, found)
        base = self._base.pop(instance, None)
        noise = self._noise
        if noise is None and base is not None and version == 0:  # version 0 has these weights
            noise = self.probe.difference(expected, base)
        limit = self.probe.limit(noise)
        if apart <= limit:
            return apart
        measured = "" if noise is None else f" ({noise:.3g} was measured with weights that both held)"
        raise WeightSyncError(
            f"{instance.name}: after the update to weight version {version} its log-probabilities of {len(expected)} "
            f"fixed tokens differ from the trainer's: {self.probe.which} difference {apart:.3g}, limit "
            f"{limit:.3g}{measured}; its weights or its numerics differ"
        )

    def keep_noise(self, difference: float) -> None:
        """Keep the difference between instances and trainer under the first version that was compared."""
        self._noise = difference if self._noise is None else self._noise

    async def self_test(self, instance: Instance) -> None:
        """Load a perturbed copy of the instance's start weights and check that its log-probabilities move. An instance
        that holds other weights, for example from an earlier run, first gets its start weights back.

        Raises WeightSyncError naming the instance. Leaves it paused with the perturbed weights, so a sync must follow.
        """
        if self.probe is None:
            return
        await self.restore_base(instance, SELF_TEST)
        base = await self.ask_probe(instance, self.probe, SELF_TEST)
        perturbed = await self._load_base(instance, self.probe.perturb, PERTURBED_VERSION, SELF_TEST)
        await self.send_request(instance, Pause("abort"), SELF_TEST)
        self._base[instance] = base
        moved = max(abs(a - b) for a, b in zip(base, perturbed, strict=True))
        if not moved > MOVED:
            raise WeightSyncError(
                f"{instance.name}: self-test failed: it loaded weights with the output rows of tokens "
                f"{self.probe.perturb} changed, and its log-probabilities moved by {moved:.3g}, expected more than "
                f"{MOVED:g}; the instance does not compute with the weights that it is sent"
            )

    async def restore_base(self, instance: Instance, during: str) -> None:
        """Have the instance serve the weights that it was started from, if it does not."""
        if not await self._serves_its_base(instance, during):
            await self._load_base(instance, [], 0, during)

    async def _serves_its_base(self, instance: Instance, during: str) -> bool:
        """Return whether the instance serves the weights it was started from. The orchestrator of another run may have
        paused it."""
        if (await self.send_request(instance, GetLoad(), during)).weight_version:
            return False
        try:
            await self.send_request(instance, Resume(), during)
        except Refused:  # a weight update is unfinished
            return False
        return True

    async def _load_base(self, instance: Instance, perturb: list[int], version: int, during: str) -> list[float]:
        await self.begin_update(instance, during, abort=True)
        await self.update_weights(instance, BaseWeights(perturb), during)
        return await self.finish_update(instance, version, during)

    async def ask_probe(self, instance: Instance, probe: Probe, during: str) -> list[float]:
        """Return the instance's log-probabilities of the probe."""
        reply = await self.send_request(instance, probe.request(), during)
        try:
            return probe.read(reply)
        except InstanceFault as error:
            raise InstanceFault(f"{instance.name}: {error} ({during})") from None

    async def world_size(self, instance: Instance, during: str) -> int:
        """Return the number of the instance's processes that take part in a transfer."""
        size = (await self.send_request(instance, GetHealth(), during)).world_size
        if size < 1:
            raise InstanceFault(f"{instance.name}: GET /health answered the world_size {size}, expected at least 1")
        return size

    async def send_request(self, instance: Instance, request: InstanceRequest[Reply], during: str) -> Reply:
        """Send a request with the update's deadline, and return its reply."""
        try:
            return await instance.client.call(request, timeout_s=self.timeout_s)
        except MetronomeError as error:
            raise type(error)(f"{error} ({during})") from None
