"""Commands of `metronome` in this process, and what a refused one may not change."""

import hashlib
import sqlite3
from contextlib import closing

from typer.testing import CliRunner

from flows.cli import app

TABLES = (
    "runs",
    "tags",
    "params",
    "registered_models",
    "model_versions",
    "model_version_tags",
    "registered_model_aliases",
)
"""Of MLflow's store: the state of its runs and what the registry has."""


def metronome(command, *arguments):
    """Run a command in this process: (exit code, what it printed)."""
    done = CliRunner().invoke(app, [command, *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def sets(*keys):
    return [part for key in keys for part in ("--set", key)]


def state_of(output):
    """Every file below the output folder's run "first" by content, all other names in that folder, and every row of
    MLflow's tables."""
    files = {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted((output / "first").rglob("*"))
    }
    files |= {path.name: "there" for path in output.glob("*")}
    with closing(sqlite3.connect(output / "mlflow.db")) as store:
        return files, {name: sorted(map(repr, store.execute(f"SELECT * FROM {name}"))) for name in TABLES}


def without_tokenizer(model):
    """Harm a model's folder, as users do."""
    for file in model.glob("tokenizer*"):
        file.unlink()


def with_cut_weights(model):
    """The same by a download that broke off."""
    file = next(model.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
