"""A real server process with a tiny model, for the tests of the HTTP routes."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.run.vllm_command import vllm_interpreter
from support.runs import ROOT

DEADLINE_S = 60.0
START_S = {"embedded": DEADLINE_S, "vllm": 600.0}
ENGINES = ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])]
"""Both answer the same routes, so both are asked the same."""
CONTEXT = 256
TOKEN = "token-of-the-tests"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}
VOCABULARY = 64
PROMPT = [5, 9, 20, 33, 7]


def save_model(folder, seed):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
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


def command(model, port_file, *extra, engine="embedded"):
    return [
        vllm_interpreter() if engine == "vllm" else sys.executable,
        "-m",
        f"engine.instance.{engine}",
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
def serving(model, folder, *extra, token=TOKEN, engine="embedded"):
    """A server process, as (process, port file's content)."""
    port_file = folder / "port.json"
    process = subprocess.Popen(
        command(model, port_file, *extra, engine=engine),
        start_new_session=True,
        env=os.environ | {"METRONOME_TOKEN": token},
        cwd=ROOT,  # vLLM's environment has no other way to the project
    )
    try:
        deadline = time.monotonic() + START_S[engine]
        while not port_file.exists():
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, f"no port file within {START_S[engine]:g} s"
            time.sleep(0.02)
        yield process, json.loads(port_file.read_text())
    finally:
        process.terminate()  # vLLM's frees its shared memory then
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@torch.no_grad()
def logprobs_of(folder, tokens, temperature=1.0, before=PROMPT):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([before + tokens])).logits[0, len(before) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
