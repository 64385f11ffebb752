"""The problem sets of a run as MLflow datasets: training rows and held-out rows."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import mlflow
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.huggingface_dataset_source import HuggingFaceDatasetSource
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Dataset, DatasetInput, InputTag

from engine.data.problem_statistics import DataReport
from tasks.tracking.mlflow_run import write_queue

DIGEST = 32
"""Number of hex digits of a version in MLflow's digest (MLflow accepts up to 36)."""


def log_datasets(found: DataReport) -> None:
    """Log a report of `tasks.prepare.prepare_data` as inputs of the tracked run, in the contexts "training" and
    "evaluation".

    The digest is the version, which is a hash of the rows. The whole hashes and the counts are tags.
    """
    client = mlflow.MlflowClient()
    own = write_queue()
    for figures, context in ((found["train"], "training"), (found["heldout"], "evaluation")):
        dataset = MetaDataset(
            _source(figures["source"]), name=_name(figures["source"]), digest=figures["version"][:DIGEST]
        )
        tags = {"version": figures["version"], "content_hash": figures["content_hash"], "rows": str(figures["rows"])}
        labels = [InputTag(key, value) for key, value in {"mlflow.data.context": context, **tags}.items()]
        entry = DatasetInput(Dataset(**dataset.to_dict()), labels)
        own.do(f"the data set {dataset.name}", partial(client.log_inputs, own.run_id, datasets=[entry]))
    own.do("the data version", lambda: client.set_tag(own.run_id, "metronome.data_version", found["train"]["version"]))


def _source(source: str) -> DatasetSource:
    whole = source.partition(" (held out")[0]
    if "://" not in whole and not Path(whole).exists():
        return HuggingFaceDatasetSource(path=whole.partition(":")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # MLflow warns that two of its own classes fit the address
        return resolve_dataset_source(whole)


def _name(source: str) -> str:
    return source.rstrip("/").rpartition("/")[2]
