"""Checkpoints of one process: everything is in them, and a resumed run is the run.

How they are written: test_checkpoint_saving.py. Layouts, and a kill while one is written:
tests/parallel/test_checkpoints.py. s3://: tests/unit/tasks/stages/test_publish.py.
"""

import json

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.algorithm import alignment
from engine.errors import BadInput
from engine.run import checkpoint_files as files
from support.checkpoint_pairs import CPU, assert_same, builder, save, train

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture
def build(settings, tmp_path):
    return builder(settings, tmp_path)


KINDS = [
    {},
    {"train__distributed_optimizer": True},
    {"train__dtype": "bfloat16"},
    {"train__dtype": "bfloat16", "train__distributed_optimizer": True},
]


GAC = {"algorithm__gradient_control": "gac", "algorithm__gac_low": 0.01, "algorithm__gac_high": 0.99}
CONTROLLED = [GAC, GAC | {"train__dtype": "bfloat16", "train__distributed_optimizer": True}]


@pytest.mark.parametrize("saved", [*KINDS, {"train__offload": True}, *CONTROLLED])
def test_a_resumed_run_is_the_run_bit_for_bit(build, saved):
    saved = saved | {"train__warmup_steps": 5, "train__steps": 9}
    policy, checkpoints = build(**saved)
    train(policy, 1), train(policy, 2)
    torch.rand(3)
    np.random.normal()  # of two that it draws, numpy keeps the second one
    save(checkpoints, 2)
    stream = CPU.rng_state()
    drawn = np.random.normal(size=3).tolist()
    other, again = build(**saved)
    torch.rand(5)
    assert again.resume() == 2
    assert np.random.normal(size=3).tolist() == drawn
    assert all(torch.equal(value, stream[name]) for name, value in CPU.rng_state().items())
    assert_same(policy, other)
    for seed in (3, 4):
        assert train(policy, seed) == train(other, seed)
        assert_same(policy, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_the_fused_kernel_of_gpus_resumes_bit_for_bit_and_computes_the_same(build, kind):
    def fused(pair, on=True):
        for group in pair[0].optimizer.param_groups:
            group["fused"] = on
        return pair

    policy, checkpoints = fused(build(**kind))
    plain, _ = fused(build(**kind), on=False)
    for seed in (1, 2):
        train(policy, seed), train(plain, seed)
    for ours, theirs in zip(policy.models.policy.parameters(), plain.models.policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if ours.dtype == torch.float32 else 2**-7, atol=1e-6)
    save(checkpoints, 2)
    other, again = fused(build(**kind))
    assert again.resume() == 2
    for seed in (3, 4):
        assert train(policy, seed) == train(other, seed)
        assert_same(policy, other)


def test_the_count_of_updates_is_where_the_fused_kernel_reads_it():
    from engine.trainer.checkpoint.state import _set_updates

    with FakeTensorMode():  # needs no GPU
        weight = torch.nn.Parameter(torch.empty(4, 3, device="cuda"))
        for fused, place in ((True, "cuda"), (False, "cpu")):
            adam = torch.optim.AdamW([weight], fused=fused)
            _set_updates(adam, 7)
            assert adam.state[weight]["step"].device.type == place


def test_automatic_thresholds_are_those_that_the_run_found_before_it_was_resumed(build, monkeypatch):
    monkeypatch.setattr(alignment, "WARM_UP", 2)
    automatic = {"algorithm__gac_low": "auto", "algorithm__gac_high": "auto", "train__learning_rate": 1e-6}
    policy, checkpoints = build(**GAC | automatic)
    for seed in (1, 2, 3):
        train(policy, seed)
    save(checkpoints, 3)
    other, again = build(**GAC | automatic)
    assert again.resume() == 3
    for one in (policy, other):
        train(one, 3)  # the same group again: the cosine is almost 1
        assert one.figures()["skipped_updates"] == 1


def plain(folder):
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_plain_tensors(str(folder))


def test_what_is_in_the_files(build):
    """Each tensor against the optimizer's and models' own, and what is in no tensor."""
    policy, checkpoints = build(train__dtype="bfloat16", train__warmup_steps=4, train__steps=9)
    train(policy, 1), train(policy, 2)
    folder = save(checkpoints, 2, reward_mean=0.25, versions_seen=[1], truncated=3)
    there = plain(folder)
    old = dict(zip(dict(policy.models.policy.named_parameters()), policy.models.old.weights, strict=True))
    adam = policy.optimizer.chained_optimizers[0].optimizer
    for name, parameter in policy.models.policy.named_parameters():
        state = adam.state[parameter.main_param]
        for prefix, value in (
            ("policy", parameter.main_param),
            ("optimizer.state.exp_avg.policy", state["exp_avg"]),
            ("optimizer.state.exp_avg_sq.policy", state["exp_avg_sq"]),
            ("old", old[name]),
        ):
            key = f"{prefix}.{name}".replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            found = torch.cat([there[f"{key}_w"], there[f"{key}_v"]]) if f"{key}_w" in there else there[key]
            assert torch.equal(found, value), key
            assert found.dtype == (torch.bfloat16 if prefix == "old" else torch.float32)
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["updates"], state["gradient_control"]) == (2, 2, {})
    assert state["layout"] == {"tensor": 1, "pipeline": 1, "context": 1, "data": 1, "expert": 1}
    assert state["inputs"] == {"weights": {"named": "", "hash": "hash", "path": ""}}
    assert state["config"]["train"]["warmup_steps"] == 4
    assert state["scheduler"]["num_steps"] == 2
    marker = files.read_marker(folder)
    assert marker["figures"] == {"reward_mean": 0.25, "truncated": 3.0}


@pytest.mark.parametrize(("saved", "loaded"), [(KINDS[0], KINDS[3]), (KINDS[3], KINDS[0]), (KINDS[1], KINDS[2])])
def test_another_optimizer_or_dtype_takes_over(build, saved, loaded):
    """Saved again by the other, weights and moments are the same files' worth of numbers."""
    policy, checkpoints = build(**saved)
    train(policy, 1), train(policy, 2)
    first = plain(save(checkpoints, 2))
    other, again = build(**loaded)
    assert again.resume() == 2
    second = plain(save(build(root=checkpoints._root / "again", policy=other, **loaded)[1], 2))
    for key, value in first.items():
        if key.startswith(("policy.", "optimizer.")):
            assert torch.equal(value, second[key]), key
    assert train(other, 3)[0] == pytest.approx(train(policy, 3)[0], rel=2e-2)  # bfloat16 has 8 bits


def test_changed_settings_take_effect_and_a_misfit_is_refused(build, settings, tmp_path):
    policy, checkpoints = build()
    train(policy, 1)
    checkpoints.prompts = "fingerprint"
    save(checkpoints, 1)
    with pytest.raises(BadInput, match=r"the weights or the config\.json of the base model .* changed since the run"):
        build("other", algorithm__kl_coef=0)[1].resume()
    assert build("other", run__accept=["weights"])[1].resume() == 1
    with pytest.raises(BadInput, match=r"--resume: run.seed is 5, but the run has 0"):
        build(run__seed=5)[1].resume()
    hotter, again = build(train__learning_rate=5e-3, train__steps=100)
    assert again.resume() == 1
    assert again.prompts == "fingerprint"
    assert train(hotter, 2)[1] == pytest.approx(5e-3)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(settings["model.path"], intermediate_size=96)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(BadInput, match=r"other.*its sizes differ from those of the run's base model \(intermediate\)"):
        build(model__path=str(tmp_path / "other"))[1].resume()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_the_first_update(build, dtype):
    policy, checkpoints = build(train__dtype=dtype)
    with torch.no_grad():
        policy.models.policy.decoder.final_layernorm.weight.mul_(2)
    policy.optimizer.reload_model_params()
    save(checkpoints, 0)
    other, again = build(train__dtype=dtype)
    assert again.resume() == 0
    assert train(policy, 1) == train(other, 1)
    assert_same(policy, other)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_bit_for_bit(build, tmp_path, capsys):
    policy, checkpoints = build()
    train(policy, 1)
    save(checkpoints, 1)
    train(policy, 2)
    file = next(save(checkpoints, 2).glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    other, again = build()
    assert again.resume() == 1
    told = capsys.readouterr().out
    assert f"step-000002: {file.name} does not match" in told
    [notice] = again.notices  # which the console and the page show
    assert notice in told
    train(other, 2)
    assert_same(policy, other)
    assert train(policy, 3) == train(other, 3)
    assert files.is_complete(save(again, 2))
    assert (file.parent.with_name("damaged-step-000002") / file.name).read_bytes() == bytes(data)
