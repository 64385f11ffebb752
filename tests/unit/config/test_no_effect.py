"""A key that nothing reads because of another key is named, with the reason."""

import pytest

from engine.config import Config
from engine.config.no_effect import without_effect
from engine.config.recipe import HOME, load_config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": {"clip_high": 0.28}}, "algorithm.clip_high = 0.28 has no effect: every ratio is 1"),
        ({"algorithm": {"loss": "gpg", "clip_low": 0.1}}, 'algorithm.loss = "gpg" does not clip the ratio this way'),
        ({"algorithm": {"kl_estimator": "k1"}}, 'algorithm.kl_estimator = "k1" has no effect: algorithm.kl_coef = 0'),
        ({"algorithm": {"gac_high": 0.5}}, "algorithm.gac_high = 0.5 has no effect"),
        ({"algorithm": {"overlong_penalty": 0.5}}, "algorithm.overlong_penalty = 0.5 has no effect"),
        ({"cluster": {"least_nodes": 1}}, 'cluster.least_nodes = 1 has no effect: cluster.engine = "pools"'),
        ({"queue": {"address": "auto"}}, 'queue.address = "auto" has no effect: queue.store = "orchestrator"'),
    ],
)
def test_a_key_without_effect_is_named(settings, said):
    (sentence,) = without_effect(Config(**settings))
    assert said in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": {"clip_high": 0.28, "old_policy": "previous"}},
        {"algorithm": {"clip_high": 0.28}, "train": {"updates": 2, "prompts_per_step": 2}},
        {"algorithm": {"clip_high": 0.28, "loss": "mine.py:loss"}},
        {"algorithm": {"kl_estimator": "k1", "kl_coef": 0.1}},
        {"algorithm": {"gac_high": 0.5, "gradient_control": "gac"}},
        {"algorithm": {"overlong_penalty": 0.5, "overlong_buffer": 4}},
        {"cluster": {"engine": "ray", "least_nodes": 1}},
        {"queue": {"store": "transferqueue", "unauthenticated": True}},
        {"stages": {"judge": {"gives": ["quality"], "reward_weight": 0.5}}},
    ],
)
def test_a_key_that_is_read_is_not(settings):
    assert list(without_effect(Config(**settings))) == []


def test_the_recipes_that_ship_have_none():
    for path in (HOME / "infra/recipes").rglob("*.toml"):
        assert list(without_effect(load_config(path))) == [], path
