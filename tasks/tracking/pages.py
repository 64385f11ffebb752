"""Addresses of MLflow's pages, for the end of a run and for Prefect."""

from __future__ import annotations

import mlflow

from engine.config import Config
from tasks.tracking.retry import STORE_ERRORS
from tasks.tracking.tracked_run import shown_uri, tracking_uri, ui_command

UI = "http://127.0.0.1:5000"
"""Address of `mlflow ui`, for a store without a server."""


def has_server(config: Config) -> bool:
    """Whether the store is a server, which has its own pages."""
    return shown_uri(config).startswith(("http://", "https://"))


def ui_address(config: Config) -> str:
    """Address of the UI: that of the server, or the one where `ui_command` starts it."""
    return (shown_uri(config) if has_server(config) else UI).rstrip("/")


def experiment_page(config: Config) -> str:
    """Address of the table of the experiment's runs; that of the UI's first page if the experiment's id cannot be read
    from the store."""
    try:
        found = mlflow.MlflowClient(tracking_uri(config)).get_experiment_by_name(config.tracking.experiment)
    except STORE_ERRORS:  # do not wait: the run is over, and its figures are in its folder
        found = None
    if found is None:
        return ui_address(config)
    return f"{ui_address(config)}/#/experiments/{found.experiment_id}/runs"


def page_rows(config: Config) -> dict[str, str]:
    """Rows of the table at the end of a run: the page with its experiment's runs and, for a store without a server, the
    command that serves it."""
    page = experiment_page(config)
    return {"MLflow": page} if has_server(config) else {"MLflow UI": ui_command(config), "its page": page}
