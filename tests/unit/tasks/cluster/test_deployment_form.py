"""The form of a deployment, against Prefect's schema of a real flow; tests/stack has the server."""

import pytest

from engine.config import Config
from engine.config.recipe import load_config
from engine.errors import BadInput
from engine.run.folder import dump_config
from flows import settings as flow_settings
from flows import stages
from flows.settings import Given, Settings, check_start, given_keys
from tasks.cluster.deployment_form import in_form_words


def test_a_setting_that_is_given_counts(monkeypatch):
    """A form sends all fields, and those that nobody changed are as in the recipe, which may have been edited since. A
    caller sends only its own, which count even if the form shows the same. The deploy's overrides stay below both."""
    shown = {"steps": 7, "group_size": 8}
    monkeypatch.setattr(flow_settings, "read_form", lambda: (shown, ["train.steps=7"]))
    caller = given_keys(Settings(name="try", steps=7), ["evaluate.problems=64"])
    assert caller.deploy == ["train.steps=7"]
    assert caller.run == ["run.name=try", "train.steps=7", "evaluate.problems=64"]
    form = given_keys(Settings(name=None, steps=7, group_size=4), [])
    assert form.all == ["train.steps=7", "rollout.group_size=4"]  # also with the deploy's list emptied
    changed = given_keys(Settings(steps=9, group_size=8), ["train.steps=7"])
    assert changed.all == ["train.steps=7", "train.steps=9"]
    assert load_config("infra/recipes/quickstart.toml", changed.all).train.steps == 9


def test_a_run_says_where_its_settings_come_from(monkeypatch, capsys):
    monkeypatch.setattr(flow_settings.deployment, "id", "some", raising=False)
    given = Given(["train.steps=7", "evaluate.problems=8"], ["train.steps=9"])
    recipe = "infra/recipes/quickstart.toml"
    given.tell(load_config(recipe, given.all), recipe)
    said = " ".join(capsys.readouterr().out.split())
    for text in ("train.steps 9 (run)", "evaluate.problems 8 (deploy)", "rollout.group_size 8 (recipe)"):
        assert text in said, said


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
    monkeypatch.setattr(flow_settings, "read_form", lambda: ({"steps": 7}, ["train.steps=7"]))
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
    monkeypatch.setattr(flow_settings, "read_form", lambda: ({}, ["model.path=another", "run.output=elsewhere"]))
    served = []
    monkeypatch.setattr(stages, "serve_until_the_run_ends", lambda config, *_: served.append(config))
    stages.serve_rollouts.fn(join="somewhere", config=str(config))
    assert [(one.model.path, one.run.output) for one in served] == [(str(tiny_model), str(tmp_path))]
