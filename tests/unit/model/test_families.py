"""Reading a model folder's configuration, what is refused in it, what Megatron is told, which layouts fit."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import Parallel
from engine.errors import BadInput
from engine.model.families import FAMILIES, parameter_rules, transformer_settings
from engine.model.rotary import rotary_frequencies
from engine.model.shape import (
    SUPPORTED,
    Experts,
    Llama3Scaling,
    ModelShape,
    check_layout,
    end_of_sequence_ids,
    read_shape,
)
from support.tiny_models import LLAMA3_ROPE, save

LLAMA = {  # Llama 3.2 1B as transformers 4 wrote it
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
DISTILLED = {  # DeepSeek-R1-Distill-Qwen-1.5B, likewise
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 1536,
    "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MOE = {  # Qwen3-30B-A3B, likewise
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def shape_of(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return read_shape(folder)


def test_configurations_of_transformers_4(tmp_path):
    llama = shape_of(tmp_path, LLAMA)
    assert llama == ModelShape(
        architecture="LlamaForCausalLM",
        layers=16,
        hidden=2048,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        vocabulary=128256,
        context=131072,
        rope_theta=500000.0,
        norm_eps=1e-5,
        tied=True,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
    )
    distilled = shape_of(tmp_path, DISTILLED)
    assert (distilled.head_dim, distilled.rope_theta, distilled.rope_scaling, distilled.tied) == (
        128,
        10000.0,
        None,
        False,
    )
    assert shape_of(tmp_path, MOE).experts == Experts(
        count=128, per_token=8, intermediate=768, normalised=True, layers=tuple(range(48))
    )


@pytest.mark.parametrize(("kind", "changes"), [
    ("qwen3", {}),  # no head_dim given: transformers takes 128, not hidden / heads
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True}),
])  # fmt: skip
def test_configurations_of_transformers_5(tmp_path, kind, changes):
    shape = read_shape(save_in(tmp_path, kind, changes))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert shape.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert shape.rope_theta == theirs.rope_parameters["rope_theta"]
    assert shape.tied == theirs.tie_word_embeddings
    assert (shape.rope_scaling is not None) == (theirs.rope_parameters["rope_type"] == "llama3")
    if shape.experts:
        assert shape.experts == Experts(count=4, per_token=2, intermediate=32, normalised=True, layers=(3,))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {
    "rope_scaling": st.sampled_from([None, {}, {"type": "default"}, LLAMA3, LLAMA3 | {"rope_theta": 5e5}])
    | st.builds(lambda first: LLAMA3 | {"original_max_position_embeddings": first}, st.sampled_from([256, 512])),
    "rope_parameters": st.sampled_from([None, {"rope_theta": 1e6}, LLAMA3 | {"rope_theta": 2e6}]),
    "rope_theta": st.sampled_from([7e4, 10000]),
    "original_max_position_embeddings": st.just(1024),
    "num_key_value_heads": st.sampled_from([None, 1, 2, 4]),
    "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
}
"""Keys of config.json; each may be missing."""


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=60)
@given(st.fixed_dictionaries({}, optional=ROPE))
def test_a_configuration_is_read_as_transformers_reads_it(found):
    written = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 64}
    written |= (
        {"num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
        | {"max_position_embeddings": 4096}
        | found
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(written))
        shape = read_shape(Path(folder), weights=False)
        theirs = AutoConfig.from_pretrained(folder)
    assert torch.equal(rotary_frequencies(shape), LlamaRotaryEmbedding(theirs).inv_freq)
    sizes = (theirs.num_key_value_heads, theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (shape.kv_heads, shape.norm_eps, shape.context) == sizes


def save_in(folder, kind, changes):
    save(folder, kind, **changes)
    return folder


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            LLAMA,
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM is not supported; supported: LlamaForCausalLM, Q",
        ),
        (LLAMA, {"attention_bias": True}, "attention_bias = True is not supported for LlamaForCausalLM"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias = True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear' is not supported"),
        (
            LLAMA,
            {"rope_scaling": {"full_attention": {"rope_theta": 1e4}}},
            "expected one set of numbers for all layers",
        ),
        (LLAMA, {"rope_scaling": "yarn"}, "rope_parameters (rope_scaling) = 'yarn'"),
        (MOE, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_type = 'yarn'"),
        (
            MOE,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.5",
        ),
        (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA, {"vocab_size": None}, "a size is not a number"),
        (LLAMA, {"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "key 'low_freq_factor' is missing"),
        (DISTILLED, {"use_sliding_window": True}, "use_sliding_window = True"),
        (DISTILLED, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (DISTILLED, {"use_mrope": True}, "use_mrope = True"),
        (MOE, {"attention_bias": True}, "attention_bias = True is not supported for Qwen3MoeForCausalLM"),
        (
            MOE,
            {"num_experts_per_tok": 129},
            "num_experts_per_tok 129 must be at least 1 and at most the number of experts, 128",
        ),
        (MOE, {"num_experts_per_tok": 1}, "norm_topk_prob with num_experts_per_tok = 1"),
    ],
)
def test_refused_by_name(tmp_path, base, changes, message):
    with pytest.raises(BadInput) as refused:
        shape_of(tmp_path, base | changes)
    assert message in str(refused.value)
    assert str(tmp_path / "config.json") in str(refused.value)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(BadInput, match=r"no \*\.safetensors there; other weight formats are not read"):
        read_shape(tmp_path)


def test_a_link_out_of_a_model_folder_is_not_followed(tmp_path):
    """The files of a snapshot in the hub's cache lead to the repository's blobs."""
    (tmp_path / "id_rsa").write_text("secret")
    snapshot = tmp_path / "hub/models--a--b/snapshots/0123"
    blobs = tmp_path / "hub/models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    shape_of(blobs, LLAMA)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (tmp_path / "model").symlink_to(snapshot)
    assert read_shape(tmp_path / "model") == read_shape(blobs)
    (snapshot / "NOTICE.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(BadInput, match=r"model: NOTICE.txt is a link out of this folder, to .*id_rsa: put the file"):
        read_shape(tmp_path / "model")


def test_every_supported_architecture_has_a_family(tmp_path):
    assert set(SUPPORTED) == set(FAMILIES)
    tied = shape_of(tmp_path, LLAMA)
    untied = shape_of(tmp_path, DISTILLED)
    assert parameter_rules(tied)["output_layer.weight"].theirs == ("model.embed_tokens.weight",)
    assert parameter_rules(untied)["output_layer.weight"].theirs == ("lm_head.weight",)


def test_settings(tmp_path):
    llama, distilled, moe = (transformer_settings(shape_of(tmp_path, config)) for config in (LLAMA, DISTILLED, MOE))
    assert (llama["kv_channels"], llama["num_query_groups"], llama["layernorm_epsilon"]) == (64, 8, 1e-5)
    assert "add_qkv_bias" not in llama
    assert "qk_layernorm" not in llama
    assert distilled["add_qkv_bias"] is True
    assert moe["qk_layernorm"] is True
    assert (moe["num_moe_experts"], moe["moe_router_topk"], moe["moe_ffn_hidden_size"]) == (128, 8, 768)
    assert moe["moe_layer_freq"] == [1] * 48
    assert moe["moe_router_pre_softmax"] is False
    assert transformer_settings(shape_of(tmp_path, MOE | {"norm_topk_prob": False}))["moe_router_pre_softmax"] is True


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {7, 8, 9}), (None, {"eos_token_id": 8}, {8}), ({}, {}, set())],
)
def test_a_response_may_end_with_the_ids_of_both_configurations(tmp_path, generation, config, ids):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert end_of_sequence_ids(tmp_path) == ids


@pytest.mark.parametrize(("given", "bad"), [("7", "'7'"), (8, "8"), ([7, None], "None"), ([[7]], r"\[7\]"), (-1, "-1")])
def test_an_end_of_sequence_that_is_no_token_is_named(tmp_path, given, bad):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 8}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(BadInput, match=rf"generation_config\.json: eos_token_id = .*{bad} is no token id; .* is 8"):
        end_of_sequence_ids(tmp_path)


def test_a_damaged_generation_config_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1,')
    with pytest.raises(BadInput, match=r"generation_config\.json: not valid JSON"):
        end_of_sequence_ids(tmp_path)


DENSE = ModelShape(
    "Qwen3ForCausalLM",
    layers=6,
    hidden=48,
    heads=12,
    kv_heads=2,
    head_dim=16,
    intermediate=80,
    vocabulary=61,
    context=128,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
ONE_HEAD = dataclasses.replace(DENSE, kv_heads=1, intermediate=81)
EVERYWHERE = Experts(count=4, per_token=2, intermediate=32, normalised=True, layers=tuple(range(6)))
MIXTURE = dataclasses.replace(DENSE, architecture="Qwen3MoeForCausalLM", intermediate=7, experts=EVERYWHERE)
DENSE_FIRST = dataclasses.replace(MIXTURE, experts=dataclasses.replace(EVERYWHERE, layers=(1, 2, 3, 4, 5)))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (DENSE, {}),
        (DENSE, {"tensor": 4, "pipeline": 3, "context": 5, "data": 7}),  # four ranks share two key-value heads
        (DENSE, {"tensor": 2, "sequence": True, "pipeline": 6}),
        (MIXTURE, {"expert": 4, "data": 4}),
        (MIXTURE, {"tensor": 2, "sequence": True}),  # no dense MLP of 7 features to be cut
    ],
)
def test_what_fits(shape, layout):
    check_layout(shape, Parallel(**layout))


@pytest.mark.parametrize(
    ("shape", "layout", "said"),
    [
        (DENSE, {"tensor": 5}, ["parallel.tensor = 5 does not divide its 12 attention heads"]),
        (
            DENSE,
            {"tensor": 3},
            ["tensor = 3 and its 2 key-value heads", "= 3 does not divide its MLPs' intermediate size 80"],
        ),
        (
            ONE_HEAD,
            {"tensor": 3},
            ["parallel.tensor = 3 does not divide the 224 rows of its query, key and value weights"],
        ),
        (DENSE, {"pipeline": 4}, ["parallel.pipeline = 4 does not divide its 6 layers"]),
        (DENSE, {"expert": 2, "data": 2}, ["parallel.expert = 2 shares experts, but the model has none"]),
        (MIXTURE, {"expert": 3, "data": 3}, ["parallel.expert = 3 does not divide its 4 experts"]),
        (MIXTURE, {"tensor": 2}, ["parallel.tensor = 2 on a model with experts needs parallel.sequence = true"]),
        (DENSE_FIRST, {"tensor": 2, "sequence": True}, ["= 2 does not divide its MLPs' intermediate size 7"]),
    ],
)
def test_every_broken_rule_is_named_with_its_numbers(shape, layout, said):
    with pytest.raises(BadInput, match=shape.architecture) as refused:
        check_layout(shape, Parallel(**layout))
    message = str(refused.value)
    assert all(text in message for text in said), message
    assert message.count(";") == len(said) - 1
