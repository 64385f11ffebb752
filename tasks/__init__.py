"""One file per stage of the pipeline, each a Prefect task around a call into the engine."""

import os

for _switch, _value in {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",  # each line is a request, which costs seconds per run
}.items():
    os.environ.setdefault(_switch, _value)  # set here, because the libraries read them when they are imported
