"""Gives the figures of a run folder to the trackers of `tracking.also`, each by its own package: those that MLflow
gets, under the same names, from when this process begins."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from engine.config import Config
from engine.config.keys import flatten_keys
from engine.errors import BadInput
from engine.run.run_file import read_run
from tasks.terminal.console import print_error
from tasks.tracking.store import first_line

CLOSE_S = 60.0
"""Seconds that the end of a run waits for MLflow, and that of a run or an evaluation for these trackers, at most."""

Figures = Mapping[str, float]


Tracker = tuple[Callable[[int, Figures], object], Callable[[], object]]
"""An open run of a tracker: what takes the figures of a step, and what ends the run."""


def _tensorboard(config: Config) -> Tracker:
    """Event files in `tensorboard/` of the run folder (`tensorboard --logdir runs`)."""
    from tensorboard.summary import Writer

    writer = Writer(str(config.folder / "tensorboard"))

    def log(step: int, figures: Figures) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def _wandb(config: Config) -> Tracker:
    """A run of wandb in the project `tracking.experiment`. WANDB_MODE=offline keeps it in the run folder."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # else it asks a person at the terminal to log in, and waits
    number = read_run(config.folder).id
    run = wandb.init(
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
    run.define_metric("*", step_metric="step")  # an evaluation may be logged after later steps
    return lambda step, figures: run.log({"step": step, **figures}), run.finish


def _trackio(config: Config) -> Tracker:
    """A run of trackio in the project `tracking.experiment`, in TRACKIO_DIR: one for each process, because a name may
    have been another run's before."""
    import trackio

    run: Any = trackio.init(
        config.tracking.experiment,
        name=config.run.name,
        resume="never",
        config=_settings(config),
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return lambda step, figures: run.log(metrics=dict(figures), step=step), run.finish


def _settings(config: Config) -> dict[str, Any]:
    return dict(flatten_keys(config.model_dump(mode="json")))


TRACKERS: Mapping[str, Callable[[Config], Tracker]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
"""How to open a run, by the name in `tracking.also`, which is also that of the package and of Metronome's extra."""


def check_others(config: Config) -> None:
    """Raise BadInput if a package of `tracking.also` is not installed."""
    for name in config.tracking.also:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"tracking.also: {name} is not installed; install it: pip install 'metronome[{name}]'")


class OtherTrackers:
    """The trackers of `tracking.also`, each opened when there is something to log. They log in a thread, so that none
    delays a run. It must be closed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()
        """Trackers that raised: each is reported once, and left alone until the run is resumed."""
        self._waiting: SimpleQueue[tuple[int, Figures] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="other trackers", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Figures) -> None:
        """Have the figures of a step logged; returns immediately."""
        self._waiting.put((step, figures))

    def close(self, within_s: float) -> None:
        """Log the rest, and end the trackers' runs, within `within_s` seconds."""
        self._waiting.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            print_error(f"warning: the trackers of tracking.also did not end within {within_s:g} s")

    def _work(self) -> None:
        while (found := self._waiting.get()) is not None:
            for name in self._config.tracking.also:
                self._attempt(name, partial(self._log, name, *found))
        for opened, (_, close) in self._open.items():
            self._attempt(opened, close)

    def _log(self, name: str, step: int, figures: Figures) -> None:
        if name not in self._open:
            self._open[name] = TRACKERS[name](self._config)
        self._open[name][0](step, figures)

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        if name in self._failed:
            return
        try:
            action()
        except Exception as error:  # any error of a package of others: the run goes on without it
            self._failed.add(name)
            print_error(
                f"warning: {name} (tracking.also) does not take the figures: {first_line(error)}. The run continues; "
                "they are in the run folder and in MLflow"
            )
