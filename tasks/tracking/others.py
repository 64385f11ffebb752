"""Gives the figures of a run folder to the trackers of `tracking.also`, each by its own package: the rows that MLflow
gets, under the same names.

A file in the run folder says how many rows each tracker has, so that a resume or a later evaluation goes on after them.
A row is given again only if the process or the tracker fails between the row and that note.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.errors import BadInput
from engine.evaluation.tables import rows_of
from engine.run.files import read_json, read_lines, seal, write_json
from engine.run.folder import RunFolder
from engine.run.identity import read_run_id
from tasks.console import print_error
from tasks.fenced import run_folder
from tasks.tracking.metric_names import evaluation_numbers, metric_name, metric_values
from tasks.tracking.mirror import EVERY_S
from tasks.tracking.retry import first_line

STATE = "also.json"
"""File of the run folder, sealed: tracker → the number of steps and of evaluations that it has."""
CLOSE_S = 60.0
"""Seconds that the end of a run or an evaluation waits for these trackers at most."""

Figures = Mapping[str, float]


class Tracker(Protocol):
    """An open run of a tracker."""

    def log(self, step: int, figures: Figures) -> None:
        """Take the figures of a step."""

    def flush(self) -> None:
        """Keep what was logged, even if the process is killed. Raises any error if some of it is lost."""

    def close(self) -> None:
        """End the run."""


class TensorBoard:
    """Event files in `tensorboard/` of the run folder (`tensorboard --logdir runs`)."""

    def __init__(self, config: Config) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(config.folder / "tensorboard"))

    def log(self, step: int, figures: Figures) -> None:
        """Write a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write the scalars to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb in the project `tracking.experiment`. WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self, config: Config) -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # else it asks a person at the terminal to log in, and waits
        number = read_run_id(config.folder)
        self._run = wandb.init(
            project=config.tracking.experiment,
            name=config.run.name,
            id=f"{config.run.name}-{number}" if number else config.run.name,
            resume="allow",
            dir=str(config.folder),
            config=_settings(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=CLOSE_S / 2,  # of a server that does not answer, told before the run's end
                finish_timeout=CLOSE_S,  # also as the process exits
            ),
        )
        self._run.define_metric("*", step_metric="step")  # an evaluation may be logged after later steps

    def log(self, step: int, figures: Figures) -> None:
        """Log the figures with their step."""
        self._run.log({"step": step, **figures})

    def flush(self) -> None:
        """Do nothing: wandb's own process keeps what it was given."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class Trackio:
    """A run of trackio in the project `tracking.experiment`, in TRACKIO_DIR.

    It goes on in trackio's newest run of this name only if the run folder says that trackio has rows of it: a run of
    this name may have been there before.
    """

    LOST = {"write-logs-to-sqlite", "write-logs-fragment", "persist-logs-locally", "persist-logs-fragment"}
    """What trackio has warned of when rows were lost. It raises nothing then, and warns only once."""

    def __init__(self, config: Config) -> None:
        import trackio

        self._run: Any = trackio.init(
            config.tracking.experiment,
            name=config.run.name,
            resume="allow" if "trackio" in _read_state(run_folder(config)) else "never",
            config=_settings(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, figures: Figures) -> None:
        """Log the figures of the step."""
        self._run.log(metrics=dict(figures), step=step)

    def flush(self) -> None:
        """Have trackio write the rows now; what goes to a server, it sends by itself. Raises OSError if it could not
        write some."""
        if self._run._is_local:
            with self._run._client_lock:
                self._run._flush_queues_inline()
        if self.LOST & self._run._warned_failures:
            raise OSError("it could not write rows; its own warning says why")

    def close(self) -> None:
        """Write the rest and end the run."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Config], Tracker]] = {
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}
"""By the name in `tracking.also`, which is also the name of the package and of Metronome's extra."""


def check_others(config: Config) -> None:
    """Raise BadInput if a package of `tracking.also` is not installed."""
    for name in config.tracking.also:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"tracking.also: {name} is not installed; install it: pip install 'metronome[{name}]'")


class OtherTrackers:
    """The trackers of `tracking.also`, each opened when there is something to log. Not for several threads."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = run_folder(config)
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()
        """Trackers that raised: each is reported once, and left alone until the run is resumed."""

    def push(self) -> None:
        """Give each tracker the rows that it lacks."""
        if self._folder.fence.is_passed:
            return
        for name in self._config.tracking.also:
            if name not in self._failed:
                self._attempt(name, partial(self._push, name))

    def close(self) -> None:
        """End the open runs."""
        for name, tracker in self._open.items():
            if name not in self._failed:
                self._attempt(name, tracker.close)
        self._open.clear()

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # any error of a package of others: the run goes on without it
            self._failed.add(name)
            print_error(
                f"warning: {name} (tracking.also) does not take the figures: {first_line(error)}. The run continues; "
                "they are in the run folder, and a resume tries again"
            )

    def _push(self, name: str) -> None:
        state = _read_state(self._folder)
        had = state.get(name, {"steps": 0, "evaluations": 0})
        steps = [row for row in read_lines(self._folder.steps) if row["step"] >= had["steps"]]
        evaluations = list({row["table"]: row for row in rows_of(self._folder)}.values())
        if not steps and len(evaluations) <= had["evaluations"]:
            return
        if name not in self._open:
            self._open[name] = TRACKERS[name](self._config)
        tracker = self._open[name]
        for row in steps:
            tracker.log(row["step"], metric_values(row))
        for found in evaluations[had["evaluations"] :]:
            shown = {key: value for key, value in found.items() if key not in ("protocol", "skipped")}
            benchmark = metric_name(found["benchmark"])
            tracker.log(
                found["step"], {f"{benchmark}/{key}": value for key, value in evaluation_numbers(shown).items()}
            )
        tracker.flush()
        has = {"steps": max([had["steps"], *(row["step"] + 1 for row in steps)]), "evaluations": len(evaluations)}
        write_json(self._folder.path / STATE, seal({**state, name: has}))


class OtherTrackersThread:
    """Pushes every `EVERY_S` seconds in a thread, so that no tracker delays a run. It must be closed."""

    def __init__(self, config: Config) -> None:
        self._trackers = OtherTrackers(config)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="other trackers", daemon=True)
        if config.tracking.also:
            self._thread.start()

    def close(self, within_s: float) -> None:
        """Give the trackers the rest, and end their runs, within `within_s` seconds."""
        self._end.set()
        if self._thread.ident is None:
            return
        self._thread.join(within_s)
        if self._thread.is_alive():
            print_error(
                f"warning: the trackers of tracking.also did not end within {within_s:g} s; a resume tries again"
            )

    def _work(self) -> None:
        while not self._end.wait(EVERY_S):
            self._trackers.push()
        self._trackers.push()
        self._trackers.close()


def push_once(config: Config) -> None:
    """Give the trackers of `tracking.also` what the run folder has and they lack, as after an evaluation."""
    OtherTrackersThread(config).close(CLOSE_S)


def _read_state(folder: RunFolder) -> dict[str, Any]:
    path = folder.path / STATE
    return (
        read_json(
            path,
            "the number of rows that each tracker has",
            "delete it: the trackers then get all rows again",
            kind=dict[str, Any],
            sealed=True,
        )
        if path.exists()
        else {}
    )


def _settings(config: Config) -> dict[str, Any]:
    return dict(flatten_keys(config.model_dump(mode="json")))
