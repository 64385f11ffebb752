"""Makes a policy a model of MLflow's flavour `transformers`: `mlflow.pyfunc.load_model("models:/NAME@champion")` and
`mlflow models serve` take it.

MLflow's own `log_model` would load the weights and write them a second time; here they are uploaded from where they
are.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

import yaml
from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, Schema

MODEL_FILE = "MLmodel"
"""The file by which MLflow knows a model, in its folder."""
WEIGHTS = "model"
"""Folder in that of the model with the whole policy, and so its place in MLflow's layout."""
TOKENIZER = "components/tokenizer"
"""Likewise, the place of the tokenizer's files, which are small."""
NEEDED = ("mlflow", "torch", "transformers")
"""Packages with which the model is served, in the versions of this environment."""


def model_files(policy: Path, scratch: Path) -> list[tuple[Path, str]]:
    """Each file of the model, and its folder in that of the model (""). `policy`: a Hugging Face folder. MLflow's own
    files are written to `scratch`."""
    from mlflow import pyfunc  # takes a fifth of a second

    text = Schema([ColSpec("string")])
    model = Model(signature=ModelSignature(text, text))
    model.add_flavor(
        "transformers",
        transformers_version=metadata.version("transformers"),
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=json.loads((policy / "config.json").read_text())["architectures"][0],
        model_binary=WEIGHTS,
        components=["tokenizer"],
        tokenizer_type="PreTrainedTokenizerFast",  # it reads tokenizer.json, as Metronome does
    )
    environment = scratch / "conda.yaml"
    pyfunc.add_to_model(
        model,
        loader_module="mlflow.transformers",
        conda_env=environment.name,
        model_config={"return_full_text": False},
    )
    model.save(str(scratch / MODEL_FILE))
    pip = [f"{name}=={metadata.version(name)}" for name in NEEDED]
    needs = {"channels": ["conda-forge"], "dependencies": [f"python={platform.python_version()}", "pip", {"pip": pip}]}
    environment.write_text(yaml.safe_dump(needs))
    files = [path for path in sorted(policy.rglob("*")) if path.is_file()]
    return [
        *((path, str(WEIGHTS / path.parent.relative_to(policy))) for path in files),
        *((path, TOKENIZER) for path in files if path.parent == policy and _is_of_tokenizer(path.name)),
        *((scratch / name, "") for name in (environment.name, MODEL_FILE)),  # a whole model has its MLmodel
    ]


def policy_folder(downloaded: Path) -> Path:
    """The Hugging Face folder in the downloaded artifacts of a registered model: they may be one, registered by
    hand."""
    return downloaded / WEIGHTS if (downloaded / MODEL_FILE).is_file() else downloaded


def _is_of_tokenizer(name: str) -> bool:
    return not name.endswith((".safetensors", ".index.json")) and name not in ("config.json", "generation_config.json")
