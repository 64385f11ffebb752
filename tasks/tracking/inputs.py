"""The inputs of an MLflow run: problem sets as datasets, and the base model. A repeated call writes nothing more."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.huggingface_dataset_source import HuggingFaceDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, Run

from engine.model.shape import content_hash
from tasks.tracking.metric_names import metric_name

DIGEST = 32
"""Number of hex digits of a version in MLflow's digest (MLflow accepts up to 36)."""


def log_datasets(client: mlflow.MlflowClient, run_id: str, found: Mapping[str, Any]) -> None:
    """Log a report of `tasks.prepare.prepare_data` (data.json) in the contexts "training" and "evaluation".

    The digest is the version, which is a hash of the rows. The whole hashes and the counts are tags.
    """
    entries = []
    for figures, context in ((found["train"], "training"), (found["heldout"], "evaluation")):
        dataset = MetaDataset(
            _source(figures["source"]), name=_name(figures["source"]), digest=figures["version"][:DIGEST]
        )
        tags = {"version": figures["version"], "content_hash": figures["content_hash"], "rows": str(figures["rows"])}
        labels = [InputTag(key, value) for key, value in {"mlflow.data.context": context, **tags}.items()]
        entries.append(DatasetInput(Dataset(**dataset.to_dict()), labels))
    client.log_inputs(run_id, datasets=entries)
    client.set_tag(run_id, "metronome.data_version", found["train"]["version"])


def log_base_model(client: mlflow.MlflowClient, run: Run, path: Path) -> None:
    """Log the base model: an external model with path and content hash, once per experiment. Reads its files."""
    digest = content_hash(path)
    experiment = run.info.experiment_id
    known = client.search_logged_models([experiment], filter_string=f"tags.content_hash = '{digest}'", max_results=1)
    model = (
        known[0]
        if known
        else mlflow.create_external_model(
            metric_name(path.name).replace(".", "_"),
            source_run_id=run.info.run_id,
            model_type="base",
            experiment_id=experiment,
            params={"path": str(path), "content_hash": digest},
            tags={"content_hash": digest},
        )
    )
    client.log_inputs(run.info.run_id, models=[LoggedModelInput(model.model_id)])


def _source(source: str) -> DatasetSource:
    whole = source.partition(" (held out")[0]
    if "://" not in whole and not Path(whole).exists():
        return HuggingFaceDatasetSource(path=whole.partition(":")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # MLflow warns that two of its own classes fit the address
        return resolve_dataset_source(whole)


def _name(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2]
