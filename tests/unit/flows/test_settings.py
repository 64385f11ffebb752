"""The parameters of a flow run as the form of a deployment sends them; tests/stack has the server."""

import pytest

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.folder import dump_config
from flows import settings as flow_settings
from flows import stages
from flows.settings import Given, Settings, check_start, given_keys, in_form_words


@pytest.mark.parametrize(
    ("settings", "rows", "all_keys"),
    [
        (Settings(), ["train.steps=7", "checkpoint.every=2"], ["train.steps=7", "checkpoint.every=2"]),
        (Settings(), ["train.steps=7"], ["train.steps=7"]),  # a row was deleted
        (Settings(), [], []),
        (
            Settings(),
            ["train.steps=8", "checkpoint.every=2"],
            ["checkpoint.every=2", "train.steps=8"],
        ),  # one was edited
        (Settings(steps=9), ["train.steps=7"], ["train.steps=7", "train.steps=9"]),  # the last counts
        (Settings(name="try", steps=7), ["a.b=1"], ["run.name=try", "train.steps=7", "a.b=1"]),
    ],
)
def test_what_the_form_shows_is_what_runs(monkeypatch, settings, rows, all_keys):
    """Prefect fills in the parameters of the deployment; what a person deletes there is gone."""
    monkeypatch.setattr(flow_settings, "_deployed_overrides", lambda: ["train.steps=7", "checkpoint.every=2"])
    assert given_keys(settings, rows).all == all_keys


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["foo=bar"], "the override foo=bar"),
        (["train.stepz=3"], "an override: unknown key train.stepz"),
        (["rollout.group_size=1"], "settings and overrides: rollout.group_size must be at least 2 for algorithm.advan"),
    ],
)
def test_a_refusal_speaks_of_the_form(overrides, said):
    with pytest.raises(BadInput) as refused:
        load_config(None, overrides)
    told = in_form_words(str(refused.value))
    assert said.replace("an override:", "overrides:") in told
    assert "--" not in told


def test_settings_that_contradict_each_other_are_refused(monkeypatch):
    monkeypatch.setattr(flow_settings, "_deployed_overrides", lambda: ["train.steps=7"])
    with pytest.raises(BadInput, match=r"train.steps is 9 in settings and 8 in overrides"):
        given_keys(Settings(steps=9), ["train.steps=7", "train.steps=8"])
    same = given_keys(Settings(steps=9, model="mine"), ["train.steps=9"])
    with pytest.raises(BadInput, match="continue_from = champion .* model.path names another"):
        check_start(same, "champion")
    check_start(same, "base")
    check_start(Given(["model.path=mine"], []), "nightly")  # the deploy's, from which the first night starts


def test_instances_of_a_run_get_no_key_of_the_deploy(monkeypatch, tmp_path, tiny_model):
    """A run that goes on from its last policy has another model than the deploy."""
    config = tmp_path / "config.toml"
    dump_config(Config(model={"path": str(tiny_model)}, run={"output": str(tmp_path)}), config)
    monkeypatch.setattr(flow_settings, "_deployed_overrides", lambda: ["model.path=another", "run.output=elsewhere"])
    served = []
    monkeypatch.setattr(stages, "serve_until_the_run_ends", lambda config, *_: served.append(config))
    stages.serve_rollouts.fn(join="somewhere", config=str(config))
    assert [(one.model.path, one.run.output) for one in served] == [(str(tiny_model), str(tmp_path))]
