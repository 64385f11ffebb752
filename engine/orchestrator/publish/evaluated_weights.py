"""The weights of an evaluation. No trainer sends them: the instances load them from disk, and one that joins proves
that it holds them before any of its responses counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from engine.errors import BadInput, DeadlineError, WeightSyncError
from engine.orchestrator.pool.instance import Instance
from engine.orchestrator.pool.pool import Pool
from engine.orchestrator.publish.probe import LEAST, Probe
from engine.orchestrator.publish.update_calls import UpdateCalls

PROOF = "proof of the evaluated weights"
LOOK_S = 0.1


class EvaluatedWeights:
    """Compares each instance that joins with the evaluated model: with an instance that the evaluation started from its
    folder, or without one with transformers, on this machine. The pool calls `check`."""

    version = 0
    """Instances name the weights that they were started from so."""

    def __init__(self, pool: Pool, probe: Probe, model: Path) -> None:
        """`model`: the evaluated Hugging Face folder."""
        self._pool = pool
        self._probe = probe
        self._model = model
        self._calls = UpdateCalls(probe, pool.config.rollout.timeout_s)
        self._asking = asyncio.Lock()
        self._proven: Sequence[float] | None = None
        """Log-probabilities of the probe by an instance that holds the weights; None before there is one."""
        self._computed: Sequence[float] | None = None
        """The same by transformers; None if it was not asked."""

    async def check(self, instance: Instance) -> None:
        """Have an instance serve the weights that it was started from, and compare its log-probabilities of the probe.
        Raises WeightSyncError naming it if they are not those of the evaluated model."""
        if instance.declared is None:
            await self._calls.restore_base(instance, PROOF)
            found = await self._calls.ask_probe(instance, self._probe, PROOF)
            await self._compare(instance, found)
        instance.record_version(self.version)

    async def _compare(self, instance: Instance, found: Sequence[float]) -> None:
        async with self._asking:
            await self._find_expected()
        # instances of one engine differ by less than an instance and transformers
        noise = None if self._proven is None else LEAST[self._probe.dtype]
        expected = self._computed if self._proven is None else self._proven
        assert expected is not None, "`_find_expected` has found one"
        apart = self._probe.difference(expected, found)
        limit = self._probe.limit(noise)
        if not apart <= limit:
            why = (
                f"{instance.name} does not hold the weights of {self._model}: its log-probabilities of {len(expected)} "
                f"fixed tokens differ from the model's, {self._probe.which} difference {apart:.3g}, limit {limit:.3g}; "
                "start it with a copy of this folder"
            )
            self._pool.refused[instance.name, instance.client.url] = why
            raise WeightSyncError(why)
        self._proven = self._proven or found

    async def _find_expected(self) -> None:
        if self._proven is not None or self._computed is not None:
            return
        if not self._pool.config.rollout.instances:
            self._computed = await asyncio.to_thread(
                compute_logprobs, self._model, self._pool.config.model.dtype, self._probe.token_ids
            )
            return
        deadline = time.monotonic() + self._pool.config.rollout.timeout_s
        while (own := next((one for one in self._pool.instances if one.declared and one.takes_prompts), None)) is None:
            if time.monotonic() > deadline:
                raise DeadlineError("no instance of the evaluation's own serves, with which one that joins is compared")
            await asyncio.sleep(LOOK_S)
        self._proven = await self._calls.ask_probe(own, self._probe, PROOF)


def compute_logprobs(model: Path, dtype: str, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each token after the first, by transformers on the CPU.

    Raises BadInput if this machine's memory does not hold the model.
    """
    import psutil
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if size > (free := psutil.virtual_memory().available):
        raise BadInput(
            f"{model} ({size / 2**30:,.1f} GiB) does not fit into this machine's memory ({free / 2**30:,.1f} GiB are "
            "free), so instances that join can't be compared with it: set rollout.instances to 1 or more"
        )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True).eval()
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logits = loaded(ids).logits[0, :-1].float()
    return list(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())
