"""Prefect flows and the `metronome` command line. They define the order of the work; the work itself is in `tasks`."""

import tasks  # noqa: F401  switches telemetry off before Prefect is imported

QUICKSTART = "infra/recipes/quickstart.toml"
"""The default recipe of the commands and the pipeline."""
OWN_DATA = "infra/recipes/own_data.toml"
"""The default recipe of a training whose command sets data.train."""
