"""The steps of a weight update on one instance, in the order in which the routes want them, and its checks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.errors import MetronomeError, WeightSyncError
from engine.launcher.pool.instance import Instance
from engine.launcher.pool.instance_client import InstanceFault
from engine.launcher.weight_sync.probe import TOLERANCE, Probe
from engine.wire.weights.buckets import SELF_TEST, title

PERTURBED_VERSION = 2**40
"""Named by an instance with perturbed weights: no step accepts it."""
MOVED = 0.01
"""The least by which a log-probability must move when weights are perturbed."""


class UpdateCalls:
    """Calls to instances; each raises what InstanceClient.call raises, and says `during` what: "weight version 3"."""

    def __init__(self, probe: Probe | None, timeout_s: float) -> None:
        """`timeout_s`: of every call."""
        self.probe = probe
        self.timeout_s = timeout_s

    async def post(self, instance: Instance, route: str, body: dict[str, Any], during: str) -> dict[str, Any]:
        """POST with the update's deadline."""
        return await self._call(instance=instance, method="POST", route=route, body=body, during=during)

    async def pause(self, instance: Instance, during: str, abort: bool = False) -> None:
        """Until nothing runs; `abort` breaks off what runs."""
        await self.post(instance, f"/pause?mode={'abort' if abort else 'wait'}", {}, during)

    async def start(self, instance: Instance, during: str) -> None:
        """Begin an update, or begin it again."""
        await self.post(instance, "/start_weight_update", {}, during)

    async def update(self, instance: Instance, update_info: dict[str, Any]) -> None:
        """Receive and load a bucket."""
        await self.post(instance, "/update_weights", {"update_info": update_info}, title(update_info))

    async def name(self, instance: Instance, version: int, during: str) -> None:
        """The update is whole: it is that version, and the instance serves it."""
        await self.post(instance, "/finish_weight_update", {"weight_version": version}, during)
        await self.post(instance, "/reset_prefix_cache", {}, during)
        await self.post(instance, "/resume", {}, during)

    async def swap(self, instance: Instance, version: int) -> None:
        """Name the version, and see that the instance does. Raises WeightSyncError naming the instance."""
        during = f"weight version {version}"
        await self.name(instance, version, during)
        holds = (
            await self._call(instance=instance, method="GET", route="/weight_version", body=None, during=during)
        ).get("weight_version")
        if holds != version:
            raise WeightSyncError(
                f"{instance.name}: it holds weight version {holds} after an update to version {version}"
            )

    async def compare(
        self, instance: Instance, version: int, trainer: Callable[[], Awaitable[Sequence[float] | None]]
    ) -> None:
        """What the instance makes of the version, with the trainer's log-probabilities of the probe, which it is asked
        for first: the trainer computes them meanwhile. None of them: nothing to compare.

        Raises WeightSyncError naming the instance.
        """
        if self.probe is None:
            return
        found = await self.ask(instance, self.probe, f"weight version {version}")
        expected = await trainer()
        if not expected:
            return
        apart = self.probe.difference(expected, found)
        limit, which = TOLERANCE[self.probe.dtype]
        if not apart <= limit:
            raise WeightSyncError(
                f"{instance.name}: after the update to weight version {version} its log-probabilities of "
                f"{len(expected)} fixed tokens differ from the trainer's: {which} difference {apart:.3g}, limit "
                f"{limit:g}; it computes with other weights, or otherwise"
            )

    async def self_test(self, instance: Instance) -> None:
        """Load perturbed weights and then those it was started from: its log-probabilities must move.

        Raises WeightSyncError naming the instance. Leaves it with the weights it was started from, as version 0.
        """
        if self.probe is None:
            return
        found = []
        for perturb, version in ((self.probe.perturb, PERTURBED_VERSION), ([], 0)):
            await self.pause(instance, SELF_TEST, abort=True)
            await self.start(instance, SELF_TEST)
            await self.update(instance, {"transport": "base", "perturb": perturb})
            await self.name(instance, version, SELF_TEST)
            found.append(await self.ask(instance, self.probe, SELF_TEST))
        moved = max(abs(a - b) for a, b in zip(*found, strict=True))
        if not moved > MOVED:
            raise WeightSyncError(
                f"{instance.name}: self-test failed: it loaded weights with the output rows of tokens "
                f"{self.probe.perturb} changed, and its log-probabilities moved by {moved:.3g}, expected more than "
                f"{MOVED:g}; it computes with something else than the weights it is given"
            )

    async def ask(self, instance: Instance, probe: Probe, during: str) -> list[float]:
        """The instance's log-probabilities of the probe."""
        reply = await self.post(instance, "/v1/completions", probe.request(), during)
        try:
            return probe.read(reply)
        except InstanceFault as error:
            raise InstanceFault(f"{instance.name}: {error} ({during})") from None

    async def world_size(self, instance: Instance, during: str) -> int:
        """Processes of the instance that take part in a transfer."""
        size = (
            await self._call(instance=instance, method="GET", route="/get_world_size", body=None, during=during)
        ).get("world_size")
        if not isinstance(size, int) or size < 1:
            raise InstanceFault(f"{instance.name}: GET /get_world_size answered {size!r}")
        return size

    async def _call(
        self, instance: Instance, method: str, route: str, body: dict[str, Any] | None, during: str
    ) -> dict[str, Any]:
        try:
            return await instance.client.call(method, route, body, timeout_s=self.timeout_s)
        except MetronomeError as error:
            raise type(error)(f"{error} ({during})") from None
