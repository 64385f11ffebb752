"""Prefect flows and the `metronome` command line. They say in which order things happen; the work is in `tasks`."""

import tasks  # noqa: F401  switches telemetry off before Prefect is imported

QUICKSTART = "infra/recipes/quickstart.toml"
"""The recipe that commands and the pipeline take by default."""
