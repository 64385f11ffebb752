"""Prefect flows and the `metronome` command line: what happens when, no logic."""

import tasks  # noqa: F401  switches telemetry off before Prefect is imported

QUICKSTART = "infra/recipes/quickstart.toml"
"""The recipe that commands and the pipeline take by default."""
