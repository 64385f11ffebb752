"""The check of a conversion: what it reports, and what it finds."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.errors import BadInput, MetronomeError
from engine.model.shape import content_hash
from engine.platform import get_platform, single_session
from engine.tools import conversion
from support.tiny_models import save


@pytest.fixture(scope="module", autouse=True)
def _megatron():
    with single_session(get_platform("cpu")):
        yield


def add(folder, name, tensor):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path, metadata={"format": "pt"})


def test_a_folder_in_bfloat16(tmp_path):
    save(tmp_path / "fp32", "qwen3", head_dim=16)
    AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"
    told = []
    report = conversion.check_conversion(tmp_path / "bf16", told.append)
    assert sorted({text[:11] for text in told}) == [f"part {number} of 4" for number in (1, 2, 3, 4)]
    assert report.round_trip_identical
    assert report.max_logit_error <= 1e-5
    assert report.content_hash == content_hash(tmp_path / "bf16")
    assert report.weight_bytes == 4 * report.parameters == 4 * 47632
    assert report.peak_bytes > report.weight_bytes


def test_a_tensor_that_the_architecture_does_not_have_is_named(tmp_path):
    save(tmp_path, "llama")
    add(tmp_path, "model.layers.0.self_attn.o_proj.bias", torch.ones(48))
    with pytest.raises(
        BadInput, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.bias does not belong to a LlamaForCausalLM"
    ):
        conversion.check_conversion(tmp_path)


def test_a_tied_embedding_may_be_stored_twice_but_not_with_other_values(tmp_path):
    save(tmp_path, "qwen2", tie_word_embeddings=True)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    add(tmp_path, "lm_head.weight", table.clone())
    assert conversion.check_conversion(tmp_path).round_trip_identical
    add(tmp_path, "lm_head.weight", table + 1)
    with pytest.raises(BadInput, match=r"tensor lm_head\.weight does not belong to a Qwen2ForCausalLM"):
        conversion.check_conversion(tmp_path)


def test_a_conversion_holds_the_weights_once(tmp_path):
    """In shards of a tenth of them; the largest parameter is a tenth too.
    Twice the weights would be above the bound."""
    sizes = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=4, vocab_size=8000
    )
    LlamaForCausalLM(sizes).save_pretrained(tmp_path, max_shard_size="16MB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 8
    Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak anew
    before = get_platform("cpu").peak_bytes()
    report = conversion.check_conversion(tmp_path)
    assert report.weight_bytes > 150e6
    assert report.peak_bytes - before <= 1.5 * report.weight_bytes


def test_wrong_logits_are_found(tmp_path, monkeypatch):
    save(tmp_path, "llama")
    from engine.model import rotary

    monkeypatch.setattr(rotary, "rotary_frequencies", lambda shape: torch.full((shape.head_dim // 2,), 0.1))
    with pytest.raises(MetronomeError, match=r"conversion is wrong: logits differ by .* \(limit 0\.0001\)"):
        conversion.check_conversion(tmp_path)
