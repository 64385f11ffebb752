"""What `metronome serve --model` makes of a run folder and of a model's folder."""

from pathlib import Path

import pytest

from engine.config import Config
from engine.errors import BadInput
from engine.run.folder import dump_config
from engine.run.served_model import CONTEXT, model_folder, served_config
from support.tiny_models import save


@pytest.fixture
def run(tmp_path):
    """A run folder before its end: it has no policy."""
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    config = Config.model_validate({"run": {"name": "mine"}, "rollout": {"max_context": 96, "max_new_tokens": 8}})
    dump_config(config, folder / "config.toml")
    return folder


def test_a_run_is_served_with_its_policy_its_recipe_and_its_name(run):
    save(run / "policy")
    for place in (run, run / "policy"):
        config, name = served_config(str(place), "", ["rollout.max_new_tokens=9"])
        assert (config.model.path, name) == (str(run / "policy"), "mine")
        assert (config.rollout.max_context, config.rollout.max_new_tokens) == (96, 9)
        folder, found = model_folder(str(place))
        assert (folder, found.path) == (run / "policy", run)
    assert served_config(str(run), "", ["rollout.max_context=8"])[0].rollout.max_context == 8
    assert served_config(str(run), "infra/recipes/quickstart.toml", [])[0].rollout.max_context == 128


def test_a_run_without_a_policy_is_refused(run):
    with pytest.raises(BadInput, match="has no policy yet.*after the last step"):
        served_config(str(run), "", [])


@pytest.mark.parametrize(("positions", "context"), [(64, 64), (10**6, CONTEXT)])
def test_a_model_gets_the_context_that_it_was_made_for_up_to_a_limit(tmp_path, positions, context):
    folder = tmp_path / "llama"
    save(folder, max_position_embeddings=positions)
    config, name = served_config(str(folder), "", [])
    assert (config.model.path, name, config.rollout.max_context) == (str(folder), "llama", context)
    assert served_config(str(folder), "", ["rollout.max_context=32"])[0].rollout.max_context == 32
    assert model_folder(str(folder)) == (folder, None)


def test_a_folder_without_a_model_and_a_missing_one_are_told_apart(tmp_path):
    missing = Path("runs/x")
    for place, why in ((tmp_path, "it has no config.json"), (missing, f"there is no folder {Path.cwd() / missing}")):
        with pytest.raises(BadInput) as refused:
            served_config(str(place), "", [])
        assert f"{place}: {why}; expected a run folder with a policy, a checkpoint of a run" in str(refused.value)


def test_a_runs_name_alone_is_answered_with_its_folder(run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    with pytest.raises(BadInput, match="did you mean runs/mine\\?; expected"):
        served_config("mine", "", [])
