"""Where a nightly run starts, against a real MLflow store."""

import shutil
from pathlib import Path

import mlflow
import pytest
from conftest import config_of

from engine.errors import BadInput
from engine.recipe import dump
from tasks import tracking
from tasks.continuing import model_folder, started_from

RECIPE = "infra/recipes/nightly.toml"


@pytest.fixture
def config(settings):
    return config_of(settings)


def register(config, name="metronome-nightly", alias=None):
    """What a finished run leaves in the registry: a version of the model with the policy's folder."""
    (config.folder / tracking.RUN_ID).unlink(missing_ok=True)  # each is a night's run of its own
    with tracking.tracked(config):
        version = tracking.register(name, Path(config.model.path))
    if alias:
        mlflow.MlflowClient(tracking.tracking_uri(config)).set_registered_model_alias(name, alias, version)


def test_nights_in_a_row(config, capsys):
    output = Path(config.run.output)
    assert started_from(config, RECIPE, "base") == config
    assert started_from(config, RECIPE, "latest") == config
    assert "no policy of metronome-nightly is registered yet" in capsys.readouterr().out
    with pytest.raises(BadInput, match="no policy of metronome-nightly is registered"):
        model_folder(config, RECIPE, "latest")
    assert model_folder(config, RECIPE, "").model.path == config.model.path

    register(config)
    with pytest.raises(BadInput, match="no version of metronome-nightly has the alias champion"):
        started_from(config, RECIPE, "champion")
    begun = started_from(config, RECIPE, "latest")
    assert Path(begun.model.path).name == "metronome-nightly-1"
    for file in Path(config.model.path).iterdir():
        assert (Path(begun.model.path) / file.name).read_bytes() == file.read_bytes()

    register(config, alias="champion")
    register(config, "metronome-other")
    register(config)
    latest, champion = (Path(started_from(config, RECIPE, start).model.path) for start in ("latest", "champion"))
    assert [path.name for path in (latest, champion)] == ["metronome-nightly-3", "metronome-nightly-2"]
    assert model_folder(config, RECIPE, "latest").model.path == str(latest)

    dump(begun, config.folder / "config.toml")  # a run that began two nights ago, resumed now
    assert started_from(config, RECIPE, "latest") == begun

    (config.folder / "config.toml").unlink()
    shutil.rmtree(output / "mlartifacts")
    shutil.rmtree(output / "models")
    with pytest.raises((mlflow.MlflowException, OSError)):
        started_from(config, RECIPE, "latest")
    assert not (output / "models/metronome-nightly-3").exists()  # not half of it either
