"""A real server process with a tiny model, for the tests of the HTTP routes."""

import contextlib
import json
import os
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

DEADLINE_S = 60.0
CONTEXT = 256
PROMPT = [5, 9, 20, 33, 7]


def save_model(folder, seed):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            eos_token_id=1,
            bos_token_id=0,
            pad_token_id=1,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(folder)
    return str(folder)


def command(model, port_file, *extra):
    return [
        sys.executable,
        "-m",
        "engine.instance.embedded",
        "--model",
        str(model),
        "--port",
        "0",
        "--slots",
        "4",
        "--max-context",
        str(CONTEXT),
        "--threads",
        "1",
        "--port-file",
        str(port_file),
        *extra,
    ]


@contextlib.contextmanager
def serving(model, folder, *extra, token=""):
    """A server process, as (process, port file's content)."""
    port_file = folder / "port.json"
    process = subprocess.Popen(
        command(model, port_file, *extra), start_new_session=True, env=os.environ | {"METRONOME_TOKEN": token}
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not port_file.exists():
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, f"no port file within {DEADLINE_S:g} s"
            time.sleep(0.02)
        yield process, json.loads(port_file.read_text())
    finally:
        process.kill()
        process.wait()


@torch.no_grad()
def logprobs_of(folder, tokens, temperature=1.0, before=PROMPT):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
