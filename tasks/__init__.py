"""One file per stage of the pipeline, each a Prefect task around a call into the engine."""
