"""Random models of a few thousand parameters, saved as Hugging Face folders."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
# no multiple of a vector register's width: that is where kernels treat rows differently
VOCABULARY = 61
EOS = 1
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save(folder: Path, kind: str = "qwen3", seed: int = 0, shard: str = "1GB", **settings) -> str:
    """A model with all weights random (norms and biases too), saved as a Hugging Face folder."""
    config, model_class = KINDS[kind]
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": EOS,
        "bos_token_id": 0,
        "pad_token_id": 1,
    } | (MIXTURE if kind == "qwen3_moe" else {})
    model = model_class(config(**(sizes | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def reference(folder: str) -> PreTrainedModel:
    """The model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, prompt, response, temperature: float = 1.0):
    """log softmax(logits / temperature) of a response's tokens, by one forward of transformers."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
