import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.data.tokenizer import Tokenizer
from engine.errors import BadInput
from engine.instance.embedded.cache import KeyValueCache
from engine.instance.embedded.rollout_model import RolloutModel
from support.sent import BF16
from support.tiny_models import VOCABULARY, reference, save

SHAPES = [
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ("qwen3", {"tie_word_embeddings": False, "head_dim": 24, "attention_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    (
        "qwen2",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    ("llama", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    (
        "llama",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("kind", "settings"), SHAPES)
@torch.no_grad()
def test_prefill_and_decode_give_the_logits_of_transformers(tmp_path, kind, settings, dtype):
    """In bf16 they are nearer to those of the same weights in fp32 than the logits of transformers' bf16 are."""
    folder = save(tmp_path, kind, **settings)
    model = RolloutModel(folder, 64, dtype)
    expected = reference(folder).to(dtype).float()
    sequences = torch.randint(0, VOCABULARY, (3, 12))
    prompts = (5, 7, 2)  # the rows stand at different positions
    cache = KeyValueCache(
        layers=len(model.layers), slots=4, kv_heads=model.kv_heads, head_dim=model.head_dim, capacity=32
    )
    truth = expected(sequences).logits
    coarse = expected.to(dtype)(sequences).logits.float()
    close = {"atol": max(1e-4, (coarse - truth).abs().max().item()), "rtol": 0}
    for slot, length in enumerate(prompts):
        begin = length // 2  # the prompt in two pieces
        first = model.prefill([(sequences[slot, :begin].tolist(), None)])[0]
        rest = model.prefill([(sequences[slot, begin:length].tolist(), first)])[0]
        cache.fill(slot, [first, rest])
        torch.testing.assert_close(first.logits, truth[slot, begin - 1], **close)
        torch.testing.assert_close(rest.logits, truth[slot, length - 1], **close)
    for step in range(5):
        at = torch.tensor(prompts) + step
        logits = model.decode(sequences[range(3), at], at, cache, 16)
        torch.testing.assert_close(logits, truth[range(3), at], **close)


@torch.no_grad()
def test_a_long_turn_after_others_gives_the_logits_of_transformers(tmp_path):
    """What a tool answers may have more tokens than are attended to at a time (QUERIES)."""
    folder = save(tmp_path, "qwen3", tie_word_embeddings=True, head_dim=16)
    model = RolloutModel(folder, 320)
    tokens = torch.randint(0, VOCABULARY, (300,))
    first = model.prefill([(tokens[:40].tolist(), None)])[0]
    rest = model.prefill([(tokens[40:].tolist(), first)])[0]
    truth = reference(folder)(tokens[None]).logits[0, -1]
    torch.testing.assert_close(rest.logits, truth, atol=1e-4, rtol=0)


def test_stop_ids_are_those_of_the_generation_config_and_the_tokenizers(tmp_path, tiny_model):
    folder = save(tmp_path, eos_token_id=[1, 9])
    assert RolloutModel(folder, 16).stop_ids == {1, 9}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, folder)
    assert RolloutModel(folder, 16).stop_ids == {1, 9, *Tokenizer(tiny_model).stop_ids}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
        (
            {"kind": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_what_the_forward_does_not_compute_is_refused(tmp_path, settings, message):
    with pytest.raises(BadInput, match=message):
        RolloutModel(save(tmp_path, **settings), 16)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no config.json"):
        RolloutModel(str(tmp_path), 16)


def test_a_model_that_lacks_a_tensor_is_refused_rather_than_completed_at_random(tmp_path):
    folder = save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadInput, match="lack model.layers.1.mlp.up_proj.weight"):
        RolloutModel(folder, 16)
