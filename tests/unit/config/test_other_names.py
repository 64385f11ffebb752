"""Names of TRL and verl in an unknown key lead to ours, as docs/coming_from.md maps them."""

import json

import pytest

from engine.config.other_names import FILE, read_names
from engine.config.recipe import HOME, load_config
from engine.errors import BadInput


def test_the_names_are_those_of_the_page():
    found = read_names((HOME / "docs/coming_from.md").read_text())
    assert len(found) > 80
    assert json.loads(FILE.read_text()) == found, (
        "old: python -m engine.config.other_names > /tmp/names; mv /tmp/names engine/config/other_names.json"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("train.lr=1e-6", "unknown key train.lr: in Metronome train.learning_rate, weight_decay"),
        ("rollout.n=8", "unknown key rollout.n; did you mean rollout.group_size?"),
        ("actor_rollout_ref.rollout.n=8", "unknown key actor_rollout_ref.rollout.n; did you mean rollout.group_size?"),
        ("actor_rollout_ref.rollout.top_p=1", "top_p; did you mean rollout.top_p?"),
        ("algorithm.beta=0", "unknown key algorithm.beta: in Metronome algorithm.kl_coef"),
        ("num_generations=8", "unknown key num_generations; did you mean rollout.group_size?"),
        ("train.report_to=wandb", "unknown key train.report_to: in Metronome tracking.also, beside MLflow"),
        ("train.logger=wandb", "unknown key train.logger: in Metronome tracking.also"),
        ("per_device_train_batch_size=4", "unknown key per_device_train_batch_size: in Metronome not needed: "),
        ("hub.push=true", "unknown key hub.push: in Metronome hf upload"),
        ("lora.rank=8", "unknown key lora.rank: in Metronome not supported"),
        ("megatron.tensor_model_parallel_size=2", "in Metronome parallel.tensor, pipeline"),
        ("train.learning_rat=1", "unknown key train.learning_rat; did you mean train.learning_rate?"),
        ("lorry.rank=1", "unknown key lorry; did you mean "),
        ("steps=4", "--set steps=4: expected table.key=value"),
    ],
)
def test_an_unknown_key_leads_to_ours(given, told):
    with pytest.raises(BadInput) as refused:
        load_config(None, [given])
    assert told in str(refused.value)


def test_a_recipe_with_a_name_of_trl_at_its_top(tmp_path):
    (tmp_path / "mine.toml").write_text("num_generations = 8\n")
    with pytest.raises(BadInput, match=r"unknown key num_generations; did you mean rollout\.group_size\?"):
        load_config(tmp_path / "mine.toml")
