"""Routing replay (R3): the routes of a group decide the experts, and the trainer's router still gives the shares."""

from dataclasses import replace

import pytest
import torch

from engine.trainer.micro_batches import PackedWindows, micro_batches
from support.policies import a_group, a_policy
from support.tiny_models import save

pytestmark = pytest.mark.usefixtures("megatron")

LENGTHS = (4, 0, 16, 1)
UNKNOWN = 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three layers, of which the first is dense, with four experts each."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True}
    return save(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **sizes)


def trained(settings, folder, group, **changes):
    """What a step of a group gives: the policy after it, its log-probabilities, and what the frozen models gave."""
    policy = a_policy(settings, model__path=folder, train__ratio_gap_limit=0, algorithm__kl_coef=0.1, **changes)
    routed = {}
    for layer in policy.models.policy.decoder.layers[1:]:
        layer.mlp.router.register_forward_hook(record(routed, layer.layer_number))
    policy.start_step()
    policy.accumulate([group])
    scored = policy._frozen_scores(micro_batches([group], policy.packing, policy.group_advantages))
    return policy, [policy._policy_scores(scored)[0], scored[0].old, scored[0].reference], routed


def record(routed, layer):
    """Keep (what the router got, its shares, its map) of each pass, and its own choice."""

    def keep(router, inputs, found):
        logits = router.gating(inputs[0]).detach().view(-1, 4)
        routed.setdefault(layer, []).append((logits, logits.topk(2).indices, *found))

    return keep


def with_routes(group, routes):
    """The group with the column of its routes, from [tokens, layers, k]."""
    return replace(group, columns={"routes": routes.to(torch.uint8).numpy()})


def own_routes(routed):
    """[tokens, layers, k] of the router's choice in the first pass, in the order of the scores."""
    return torch.stack([passes[0][1] for _, passes in sorted(routed.items())], dim=1)


def other_routes(tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, 2, 4, generator=draw).topk(2).indices


def gradients(policy):
    return {name: one.main_grad.clone() for name, one in policy.models.policy.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_routers_own_routes_change_no_bit(settings, folder, recompute):
    group = a_group(LENGTHS, seed=2)
    plain, expected, routed = trained(settings, folder, group, train__recompute=recompute)
    replayed, found, _ = trained(settings, folder, with_routes(group, own_routes(routed)), train__recompute=recompute)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs) if theirs is not None else ours is None
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(replayed)[name], gradient), name
    assert any(gradient.abs().max() > 1e-3 for name, gradient in gradients(replayed).items() if "router" in name)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_experts_are_those_of_the_routes_in_every_pass(settings, folder, recompute):
    group = a_group(LENGTHS, seed=2)
    size = 9 + sum(LENGTHS)
    routes = other_routes(size)
    routes[5] = UNKNOWN  # there the router chooses
    changes = {"train__recompute": recompute, "train__dtype": "float32"}
    policy, found, routed = trained(settings, folder, with_routes(group, routes), **changes)
    assert len(routed) == 2
    for at, (_, passes) in enumerate(sorted(routed.items())):
        assert len(passes) == (3 if recompute else 2)
        for logits, own, shares, chosen in passes:
            expected = routes[:, at].clone()
            expected[5] = own[5]
            mask = torch.zeros(size, 4, dtype=torch.bool).scatter(1, expected, True)
            assert torch.equal(chosen, mask)
            torch.testing.assert_close(shares.detach(), logits.masked_fill(~mask, -torch.inf).softmax(-1))
    router = policy.models.policy.decoder.layers[1].mlp.router
    assert router.weight.main_grad.abs().max() > 1e-4  # the mask is the instance's, the shares are the trainer's
    assert torch.equal(found[0], found[2])  # the reference, which has the same weights, takes the same routes
    _, plain, _ = trained(settings, folder, group, **changes)
    assert not torch.equal(found[0], plain[0])


def test_a_split_group_has_the_routes_of_each_response(settings, folder):
    group = a_group(LENGTHS, seed=2)
    routed = with_routes(group, other_routes(9 + sum(LENGTHS)))
    whole, expected, _ = trained(settings, folder, routed)
    for changes in ({"train__micro_batch_tokens": 20}, {"attention__shared_prompt": False}):
        other, _, _ = trained(settings, folder, routed, **changes)
        for name, gradient in gradients(whole).items():
            torch.testing.assert_close(gradients(other)[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_load_of_the_busiest_expert_is_reported(settings, folder):
    group = a_group(LENGTHS, seed=2)
    routes = other_routes(9 + sum(LENGTHS))
    routes[:, 1] = torch.tensor([3, 1])  # each token of the last layer: half of its experts get all
    policy, _, _ = trained(settings, folder, with_routes(group, routes), train__recompute=True)
    policy.reduce_gradients(len(LENGTHS))
    assert policy.figures()["expert_load_max"] == 2.0
    later = other_routes(9 + sum(LENGTHS), seed=1)  # of a later step: what was counted before is gone
    policy.start_step()
    policy.accumulate([with_routes(group, later)])
    policy.reduce_gradients(len(LENGTHS))
    busiest = max(later[:, at].flatten().bincount().max().item() for at in range(2))
    assert policy.figures()["expert_load_max"] == pytest.approx(2 * busiest / len(later))


@pytest.mark.parametrize("recompute", [False, True])
def test_filler_is_no_load_of_an_expert(settings, folder, recompute):
    """Filler at the end of a row, and a row of a replica that has one less."""
    group = a_group(LENGTHS, seed=2)
    plain, _, routed = trained(settings, folder, group, train__recompute=recompute)
    expected = [2.0 * passes[0][3].sum(0).max().item() / (9 + sum(LENGTHS)) for _, passes in sorted(routed.items())]
    policy = a_policy(
        settings, model__path=folder, train__ratio_gap_limit=0, algorithm__kl_coef=0.1, train__recompute=recompute
    )
    packing = replace(policy.packing, multiple=64, share=(0, 2))
    policy._packed = PackedWindows(packing)
    policy.start_step()
    policy.accumulate([group])
    policy._packed = PackedWindows(replace(packing, share=(1, 2)))
    policy.accumulate([group])
    for one in (plain, policy):
        one.reduce_gradients(len(LENGTHS))
        assert one.figures()["expert_load_max"] == pytest.approx(max(expected))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_routers_compute_in_the_type_of_the_key(settings, folder, kind):
    changes = {"train__dtype": "bfloat16", "train__router_dtype": kind}
    policy, found, routed = trained(settings, folder, a_group(LENGTHS, seed=2), **changes)
    for logits, _, shares, _ in (one for passes in routed.values() for one in passes):
        assert logits.dtype == shares.dtype == getattr(torch, kind)
    router = policy.models.policy.decoder.layers[1].mlp.router
    assert router.weight.main_grad.abs().max() > 1e-4
    assert torch.isfinite(found[0]).all()


def test_a_dense_model_has_no_balance(settings, tmp_path):
    policy = a_policy(settings, model__path=save(tmp_path, vocab_size=256), train__ratio_gap_limit=0)
    policy.start_step()
    policy.accumulate([a_group(LENGTHS)])
    policy.reduce_gradients(len(LENGTHS))
    assert "expert_load_max" not in policy.figures()
