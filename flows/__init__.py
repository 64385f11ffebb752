"""Prefect flows and the `metronome` command line: what happens when, no logic."""

import tasks  # noqa: F401  switches telemetry off before Prefect is imported
