"""Waits for an MLflow server that does not answer, where a run cannot continue without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from engine.errors import MetronomeError
from tasks.console import complain
from tasks.tracking.write_queue import RETRY_S, STORE_ERRORS, first_line, refused

AWAY_S = 300.0
"""Seconds to wait for MLflow. A server that is restarted, or fails over, is back by then."""

Result = TypeVar("Result")


class TrackingAway(MetronomeError):
    """MLflow did not answer for the time that a run waits for it. It may answer when the run is resumed."""


def retry_while_away(what: str, action: Callable[[], Result], within_s: float | None = None) -> Result:
    """Result of a call to MLflow, which is repeated for up to `within_s` seconds (None: AWAY_S) while MLflow does not
    answer.

    It must be safe to repeat the action. Raises TrackingAway naming `what`. If MLflow refuses the call, its own error
    is raised.
    """
    patience = AWAY_S if within_s is None else within_s
    deadline = time.monotonic() + patience
    for number, pause in enumerate(itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1]))):
        try:
            return action()
        except STORE_ERRORS as error:
            if refused(error):
                raise
            if time.monotonic() + pause > deadline:
                raise TrackingAway(
                    f"{what}: MLflow did not answer for {patience:.0f} s: {first_line(error)}"
                ) from error
            if number == 0:
                complain(
                    f"warning: {what}: MLflow does not answer: {first_line(error)}. Waiting up to {patience:.0f} s for "
                    "it"
                )
        time.sleep(pause)
    raise AssertionError("the pauses never end")
