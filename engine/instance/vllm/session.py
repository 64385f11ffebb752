"""Weight updates of one vLLM worker, inside the worker: our receiver receives the weights, vLLM's layerwise reload
loads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.errors import BadInput, TransferError
from engine.instance.receiver import Named, Receiver
from engine.instance.refusals import Conflict
from engine.run.process import in_thread
from engine.types import JsonObject
from engine.wire.weights.backends import BACKENDS

KEEP_STALE_HEAD = "METRONOME_TEST_KEEP_STALE_HEAD"
"""Environment variable of a test: 1 keeps vLLM's stale copy of a tied lm_head, which the self-test must detect."""

TIED_HEAD = "lm_head.weight"

WAIT_S = 0.2
"""Seconds that `poll` waits for a bucket. So long the engine, which is paused, takes no other call."""


class WeightSession:
    """Receives weights and loads them into the worker's model, bucket by bucket between start and finish.

    A bucket is received and verified completely before it is loaded (except "base"). A broadcast bucket is verified and
    loaded while the next one arrives, so its error is raised by the next call. A refused bucket ends the update.
    If the update has loaded tensors by then, the weights are a mixture (`damaged`) until a later update finishes.
    """

    def __init__(self, worker: Any) -> None:  # noqa: ANN401
        """`worker`: vLLM's worker, with model_runner, vllm_config, device and rank."""
        self._worker = worker
        self._receiver = Receiver(device=worker.device)
        self._base = Path(worker.vllm_config.model_config.model)
        self._expected = _tensor_shapes(self._base)
        self._loaded: set[str] | None = None  # names loaded by the current update
        self._version = 0
        self._damaged = False
        self._job: tuple[int, Future[Callable[[], list[Named]] | list[Named] | None] | None] | None = None
        """Number of the last job, and its work; None for a job whose work is done."""
        self._arrived: Callable[[], list[Named]] | None = None
        """Verifies the broadcast bucket that has arrived and is not loaded."""

    # state ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return {"weight_version": version of the last finished update (0: from disk), "damaged": …, "updating":
        …}."""
        return {"weight_version": self._version, "damaged": self._damaged, "updating": self._loaded is not None}

    # the update -----------------------------------------------------------------------------------

    def begin(self, job: dict[str, Any]) -> bool:
        """Begin to join groups or to receive a bucket, in a thread, so that the engine can take other calls. Return
        what `poll` does.

        `job`: {"number", "connect": init_info} or {"number", "receive": update_info}. It replaces an older job; joining
        new groups also cancels waits in the older ones. Raise the error of the bucket before.
        """
        number = job["number"]
        if "connect" in job:
            init_info = job["connect"]  # this worker's rank in the groups is the instance's first rank plus its own
            connect = partial(self._receiver.connect, init_info, self._worker.rank)
            self._job = number, in_thread("weights", connect)
            return self.poll(number)
        info = job["receive"]
        if self._loaded is None:
            raise Conflict("weights arrived outside an update: call /begin_weight_update first")
        if info.get("transport") == "base":  # needs no sender, and is too large to hold at once
            self._load(self._receiver.receive(info, self._base))
            self._job = number, None
        else:  # received completely before loading, so that no part of a refused bucket is loaded
            self._job = number, in_thread("weights", partial(self._receive, info))
            self._load_arrived()
        return self.poll(number)

    def poll(self, number: int) -> bool:
        """Wait for the job, up to WAIT_S during an update, in which nothing is sampled. Return whether it is done; if
        so, the weights that it received are in the model, or on the way there. Raise its error, or TransferError if a
        newer job has replaced it."""
        if self._job is None or self._job[0] != number:
            raise TransferError("the weight transfer was cancelled by a newer one")
        work = self._job[1]
        if work is not None and not wait([work], 0.0 if self._loaded is None else WAIT_S).done:
            return False
        self._job = number, None
        found = work.result() if work is not None else None
        if callable(found):
            self._arrived = found
        elif found:
            self._load(found)
        return True

    def start(self) -> None:
        """Prepare the model for new weights. An update in progress is aborted, because its sender has restarted."""
        if self._loaded is not None:
            self.abort()
        with self._with_vllm_config():
            _layerwise_reload().initialize_layerwise_reload(self._model)
        self._loaded = set()

    def stage(self, update_info: JsonObject) -> None:
        """Begin to receive a bucket into host memory while generation continues."""
        self._receiver.stage(update_info)

    def finish(self, version: int) -> None:
        """Make vLLM finish its layers, and set the version. Raise Conflict if tensors are missing."""
        self._load_arrived()
        if self._loaded is None or not self._loaded:
            raise Conflict("no weights were loaded since /begin_weight_update")
        if missing := sorted(self._expected.keys() - self._loaded - ({TIED_HEAD} if self._tied else set())):
            self.abort()
            raise Conflict(f"the update lacks {len(missing)} of {len(self._expected)} tensors, the first {missing[0]}")
        self._end_reload()
        self._refresh_tied_head()
        self._loaded = None
        self._damaged = False
        self._version = version

    def abort(self) -> None:
        """End an update early. Layers without new weights keep theirs; if any tensor was loaded, the model is
        `damaged`."""
        self._arrived = None
        if self._loaded is None:
            return
        self._damaged = self._damaged or bool(self._loaded)
        self._end_reload()
        self._refresh_tied_head()
        self._loaded = None

    def close(self) -> None:
        """Leave the senders' groups."""
        self._receiver.close()

    # inside ---------------------------------------------------------------------------------------

    @property
    def _model(self) -> nn.Module:
        return self._worker.model_runner.get_model()

    @property
    def _tied(self) -> bool:
        return bool(self._worker.vllm_config.model_config.hf_text_config.tie_word_embeddings)

    def _with_vllm_config(self) -> Any:  # noqa: ANN401
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._worker.vllm_config)

    def _receive(self, update_info: JsonObject) -> Callable[[], list[Named]] | list[Named]:
        """Return a bucket's verified tensors or, if it was broadcast, a function that verifies and returns them."""
        self._receiver.check(update_info)
        if update_info["transport"] in BACKENDS:
            return self._receiver.fetch(update_info)
        return list(self._receiver.receive(update_info, self._base))

    def _load_arrived(self) -> None:
        """Verify and load the bucket that has arrived, if any."""
        arrived = self._arrived
        self._arrived = None
        if arrived is not None:
            self._load(arrived())

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        with self._with_vllm_config(), torch.device(self._worker.device), torch.no_grad():
            # vLLM's models have this method, torch's modules do not
            self._model.load_weights(self._check_and_note(tensors))  # type: ignore[operator]
            for layer in self._model.modules():
                _copy_pending(_layerwise_reload().get_layerwise_info(layer))
        if self._worker.device.type != "cpu":  # else the next bucket but one could arrive in memory that is still read
            torch.accelerator.synchronize(self._worker.device)

    def _check_and_note(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Yield the tensors, checking each one and recording it as loaded."""
        assert self._loaded is not None
        for name, tensor in tensors:
            self._check_tensor(name, tuple(tensor.shape))
            self._loaded.add(name)
            yield name, tensor

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        expected = self._expected.get(name)
        if expected is None and not (self._tied and name == TIED_HEAD):
            raise BadInput(f"{name}: the model in {self._base} has no such tensor")
        if expected is not None and expected != shape:
            raise BadInput(f"{name}: its shape is {list(shape)}, the model's is {list(expected)}")

    def _end_reload(self) -> None:
        with self._with_vllm_config():
            _layerwise_reload().finalize_layerwise_reload(self._model, self._worker.model_config)

    def _refresh_tied_head(self) -> None:
        """Pack a tied lm_head again: vLLM on the CPU computes logits from a packed copy, which a reload does not
        update."""
        head = getattr(self._model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if head is None or method is None or os.environ.get(KEEP_STALE_HEAD) == "1":
            return
        if self._tied:
            with self._with_vllm_config(), torch.no_grad():
                method.process_weights_after_loading(head)


def _copy_pending(info: Any) -> None:  # noqa: ANN401
    """Copy the tensors that vLLM keeps of an incomplete layer, because the next bucket is received into the same
    memory."""
    for _, bound in info.loaded_weights:
        for key, value in bound.arguments.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                bound.arguments[key] = value.clone()


def _layerwise_reload() -> Any:  # noqa: ANN401
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a Hugging Face folder, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
