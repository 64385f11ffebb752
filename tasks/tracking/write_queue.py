"""Writes to one MLflow run from a thread of its own, so that a slow or absent tracking server never delays a run.

Entries are in a queue, in order. While the server does not answer, the queue waits and grows (a step is about forty
numbers). It prints one warning, tries again, and prints a line when the server is back. At the end it names the entries
that were not written.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import mlflow
from botocore.exceptions import BotoCoreError, ClientError
from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from tasks.console import complain

RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between tries while the server does not answer; the last value repeats."""
FLUSH_S = 60.0
"""Seconds that the end of a run waits for the queue."""
SAMPLE_S = 10.0
"""Seconds between samples of the machine's load (MLflow's own interval)."""
BATCH = 1000
"""The largest number of metrics in one request that MLflow accepts."""


def _store_errors() -> tuple[type[Exception], ...]:
    """The errors that MLflow's tracking and artifact stores raise. Those of the library requests are OSErrors."""
    if importlib.util.find_spec("boto3") is None:
        return mlflow.MlflowException, OSError, ImportError, BotoCoreError, ClientError
    boto = importlib.import_module("boto3.exceptions")
    return mlflow.MlflowException, OSError, ImportError, BotoCoreError, ClientError, boto.Boto3Error


STORE_ERRORS = _store_errors()


@dataclass
class Write:
    """One entry of the queue: metrics, or any other call as `action`."""

    what: str
    """Its name in messages: "metrics of step 3", "timeline.html"."""
    action: Callable[[], object] | None = None
    metrics: list[Metric] = field(default_factory=list)


class WriteQueue:
    """The queue and its thread. None of its methods raises. It must be closed."""

    def __init__(self, run_id: str, say: Callable[[str], None] = complain) -> None:
        self.run_id = run_id
        self._say = say
        self._client = mlflow.MlflowClient()
        self._uri = mlflow.get_tracking_uri()
        self._queue: deque[Write] = deque()
        self._lost: list[str] = []
        self._change = threading.Condition()
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._work, name="MLflow write queue", daemon=True)
        self._thread.start()

    def metrics(self, figures: Mapping[str, float], step: int, what: str = "") -> None:
        """Add figures at a step, with the time of this call."""
        now = int(time.time() * 1000)
        entities = [Metric(name, value, now, step) for name, value in figures.items()]
        self._put(Write(what or f"metrics of step {step}", metrics=entities))

    def artifact(self, path: Path, folder: str = "") -> None:
        """Add a file, with its contents at the time of writing. `folder`: folder among the run's artifacts."""
        self.do(
            f"{folder}/{path.name}".lstrip("/"),
            lambda: self._client.log_artifact(self.run_id, str(path), folder or None),
        )

    def do(self, what: str, action: Callable[[], object]) -> None:
        """Add any call to MLflow. It is repeated until it succeeds or is refused, and must name the run id itself."""
        self._put(Write(what, action))

    def close(self, within_s: float = FLUSH_S) -> list[str]:
        """Write the rest, for at most `within_s` seconds. Returns and prints the names of what was not written."""
        with self._change:
            self._deadline = time.monotonic() + within_s
            self._change.notify()
        self._thread.join(within_s + 0.5)
        with self._change:
            missing = [*self._lost, *(record.what for record in self._queue)]
            self._queue.clear()
        if missing:
            self._say(f"warning: MLflow ({self._uri}) has not got: {enumeration(missing)}. The run folder has it all.")
        return missing

    def _put(self, record: Write) -> None:
        with self._change:
            self._queue.append(record)
            self._change.notify()

    def _work(self) -> None:
        failures = 0
        while batch := self._next():
            try:
                self._write(batch)
            except STORE_ERRORS as error:
                if refused(error):
                    self._refuse(batch, error)
                else:
                    self._complain_once(batch, error, failures)
                    failures += 1
                    if not self._pause(RETRY_S[min(failures, len(RETRY_S)) - 1]):
                        return
                    continue
            if failures:
                self._say(f"MLflow ({self._uri}) answers again; what was kept is being written")
                failures = 0
            self._drop(len(batch))

    def _next(self) -> list[Write]:
        """The first entry, or the first metrics up to the limit of a request. They stay in the queue. Empty if the
        queue is closed and everything is written."""
        with self._change:
            self._change.wait_for(lambda: self._queue or self._deadline is not None)
            if not self._queue:
                return []
            batch = [self._queue[0]]
            size = len(self._queue[0].metrics)
            for record in list(self._queue)[1:BATCH] if batch[0].action is None else ():
                size += len(record.metrics)
                if record.action is not None or size > BATCH:
                    break
                batch.append(record)
            return batch

    def _write(self, batch: list[Write]) -> None:
        if batch[0].action is not None:
            batch[0].action()
        else:
            self._client.log_batch(self.run_id, metrics=[metric for record in batch for metric in record.metrics])

    def _refuse(self, batch: list[Write], error: Exception) -> None:
        names = [record.what for record in batch]
        self._lost += names
        self._say(f"warning: MLflow ({self._uri}) refuses {enumeration(names)}: {first_line(error)}")

    def _complain_once(self, batch: list[Write], error: Exception, failures: int) -> None:
        if not failures:
            self._say(
                f"warning: MLflow ({self._uri}) does not take {batch[0].what}: {first_line(error)}. The run continues; "
                "everything is kept and written when MLflow answers"
            )

    def _pause(self, seconds: float) -> bool:
        """Wait before the next try, but not beyond the deadline. Returns whether there is time for another try."""
        with self._change:
            self._change.wait_for(lambda: self._deadline is not None, seconds)
            left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is None:
            return True
        time.sleep(max(0.0, min(left, seconds)))
        return left > seconds

    def _drop(self, count: int) -> None:
        with self._change:
            for _ in range(min(count, len(self._queue))):
                self._queue.popleft()


class MachineLoad:
    """Samples CPU, memory, disk, network and NVIDIA devices of this machine into `system/...` metrics (psutil, by
    MLflow).

    MLflow's own monitor stops at the first request that fails. Here it only measures, and the write queue sends.
    """

    def __init__(self, queue: WriteQueue, run_id: str, started_ms: int) -> None:
        self._queue = queue
        self._started = started_ms / 1000
        self._monitor = SystemMetricsMonitor(run_id)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="machine load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take a last sample and stop."""
        self._over.set()
        self._thread.join(SAMPLE_S)

    def _sample(self) -> None:
        over = False
        while not over:
            over = self._over.wait(SAMPLE_S)
            self._monitor.collect_metrics()
            figures = {f"system/{name}": value for name, value in self._monitor.aggregate_metrics().items()}
            for monitor in self._monitor.monitors:
                monitor.clear_metrics()
            self._queue.metrics(figures, int(time.time() - self._started), "system metrics")


def refused(error: Exception) -> bool:
    """Whether another try is pointless, because the request is wrong (4xx), or a file or a module is missing."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, mlflow.MlflowException):
        status = error.get_http_status_code()
    wrong = status is not None and 400 <= status < 500 and status not in (408, 429)
    return wrong or isinstance(error, FileNotFoundError | ImportError)


def first_line(error: Exception) -> str:
    """The first line of a message, at most 300 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def enumeration(names: list[str]) -> str:
    """Names as one text, such as "metrics of step 3 to 7, timeline.html": ranges of steps, and each name once."""
    prefix = "metrics of step "
    steps = sorted({int(name.removeprefix(prefix)) for name in names if name.startswith(prefix)})
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    parts = [prefix + (str(first) if first == last else f"{first} to {last}") for first, last in runs]
    return ", ".join([*parts, *dict.fromkeys(name for name in names if not name.startswith(prefix))])
