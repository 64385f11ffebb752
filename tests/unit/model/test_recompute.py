"""What is recomputed in the backward pass changes no bit: gradients, weights after an update, routes, counts."""

from dataclasses import replace

import pytest
import torch

from engine.model import norm
from engine.model.routing import take_counts
from support.policies import a_group, a_policy
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")

SETTINGS = ("selective", 1, 2, True)
LENGTHS = (4, 0, 16, 1)


def stepped(settings, folder, groups, **changes):
    """What a step gives: gradients, weights after the update, tokens of each expert, and each pass of each router."""
    policy = a_policy(settings, model__path=folder, train__ratio_gap_limit=0, train__learning_rate=1e-2, **changes)
    chosen = {}
    for layer in policy.models.policy.decoder.layers:
        if hasattr(layer.mlp, "router"):
            passes = chosen.setdefault(layer.layer_number, [])
            layer.mlp.router.register_forward_hook(lambda router, got, found, passes=passes: passes.append(found[1]))
    policy.start_step()
    policy.accumulate(groups)
    parameters = dict(policy.models.policy.named_parameters())
    gradients = {name: one.main_grad.clone() for name, one in parameters.items()}
    counts = take_counts(policy.models.policy)
    policy.reduce_gradients(sum(len(group.responses) for group in groups))
    policy.step_optimizer()
    return gradients, {name: one.detach().clone() for name, one in parameters.items()}, counts, chosen


def assert_same_bits(found, expected):
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, one in theirs.items():
            assert torch.equal(ours[name], one), name
    assert found[2] == expected[2]


@pytest.mark.parametrize(("kind", "shared"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_a_dense_model_has_the_same_gradients_and_weights(settings, tmp_path, kind, shared):
    sizes = {"vocab_size": 256, "num_hidden_layers": 3, "hidden_size": 96, "intermediate_size": 160}
    folder = save(tmp_path, kind, **sizes)
    groups = [
        a_group(LENGTHS, seed=2),
        a_group((40, 200, 130), index=1, seed=3, prompt=30),
    ]  # torch, oneDNN
    changes = {"attention__shared_prompt": shared, "algorithm__kl_coef": 0.1}
    plain = stepped(settings, folder, groups, **changes)
    assert all(gradient.abs().max() > 0 for gradient in plain[0].values())
    for setting in SETTINGS:
        assert_same_bits(stepped(settings, folder, groups, train__recompute=setting, **changes), plain)


def test_a_sum_that_a_norm_makes_on_a_device_is_made_again(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(norm, "can_fuse", lambda x: True)
    monkeypatch.setattr(norm, "compile_once", lambda function: function)
    folder = save(tmp_path, "qwen3", vocab_size=256, num_hidden_layers=3)
    groups = [a_group(LENGTHS, seed=2)]
    plain = stepped(settings, folder, groups)
    assert_same_bits(stepped(settings, folder, groups, train__recompute="selective"), plain)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_mixture_keeps_its_routes_and_counts_each_token_once(settings, tmp_path, monkeypatch, replay, grouped):
    """Of three layers the first is dense; `grouped`: all experts at once, by torch in the place of a device."""
    from engine.model import experts

    if grouped:
        monkeypatch.setattr(experts, "product_for", lambda x, *sizes: experts._by_torch)
    sizes = {"vocab_size": 256, "num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True}
    folder = save(tmp_path, "qwen3_moe", **sizes)
    group = a_group(LENGTHS, seed=2)
    tokens = 9 + sum(LENGTHS)
    routes = torch.rand(tokens, 2, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices
    if replay:
        group = replace(group, columns={"routes": routes.to(torch.uint8).numpy()})
    plain = stepped(settings, folder, [group])
    assert {layer: sum(counts) for layer, counts in plain[2].items()} == {1: 2 * tokens, 2: 2 * tokens}
    for setting in SETTINGS:
        found = stepped(settings, folder, [group], train__recompute=setting)
        assert_same_bits(found, plain)
        for at, passes in enumerate(found[3].values()):
            again = setting is True or (setting != "selective" and at + 1 < setting)
            assert len(passes) == 1 + again
            assert all(torch.equal(one, plain[3][at + 2][0]) for one in passes)
            if replay:
                assert torch.equal(passes[0], torch.zeros(tokens, 4, dtype=torch.bool).scatter(1, routes[:, at], True))
