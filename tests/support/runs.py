"""A tiny random model made by our own code, and runs of the real orchestrator."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]


def byte_tokenizer(context):
    """The quickstart's tokenizer: 256 bytes and four special tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "data/quickstart_model", model_max_length=context)


def save_model(folder, **sizes):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(512)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        **{"intermediate_size": 128, "num_hidden_layers": 2, **sizes},
        vocab_size=260,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def save_problems(path):
    """Forty additions in DeepScaleR's schema."""
    rows = [{"problem": f"{n}+{n * 7 % 41}=", "answer": str(n + n * 7 % 41), "solution": ""} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def base_settings(model, problems, folder):
    """Overrides of a run of a few seconds whose rewards vary although the model is random."""
    return {
        "run.name": "run",
        "run.output": str(folder),
        "model.path": str(model),
        "data.train": str(problems),
        "data.heldout": str(problems),
        "reward.function": f"{ROOT / 'tests/support/rewards.py'}:even",
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 16,
        "rollout.max_context": 64,
        "rollout.timeout_s": 60,
        "train.timeout_s": 60,
        "train.steps": 3,
        "train.prompts_per_step": 6,
        "train.learning_rate": 1e-3,
        "algorithm.old_policy": "previous",
        "algorithm.kl_coef": 0.01,
    }


def seeded_settings(model, problems, folder, reward):
    """Overrides of a run whose numbers depend on nothing but its seed, with checkpoints that a crash may need.
    `reward`: reward.function."""
    return {
        "run.output": str(folder),
        "model.path": str(model),
        "data.train": str(problems),
        "data.heldout": str(problems),
        "reward.function": reward,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 8,
        "rollout.max_context": 64,
        "rollout.deterministic": True,
        "train.consume": "prompt_order",
        "train.prompts_per_step": 4,
        "train.learning_rate": 1e-3,
        "algorithm.old_policy": "previous",
        "algorithm.kl_coef": 0.01,
        "checkpoint.every": 2,
        "evaluate.problems": 2,
        "evaluate.max_new_tokens": 4,
    }


def overrides(settings):
    return [f"{key}={value!s}".replace("=True", "=true").replace("=False", "=false") for key, value in settings.items()]


def config_of(settings):
    from engine.config.recipe import load_config

    return load_config(None, overrides(settings))


def write_config(settings, folder):
    from engine.run.folder import dump_config

    path = Path(folder) / f"{settings['run.name']}.toml"
    dump_config(config_of(settings), path)
    return path


def launch(settings, folder, *arguments, timeout_s=200):
    """Run the orchestrator to its end: (exit code, output)."""
    command = [
        sys.executable,
        "-m",
        "engine.orchestrator.launch",
        "--config",
        str(write_config(settings, folder)),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


class Tree:
    """A process and all its descendants, found while it lives, so that orphans can be looked for after its end."""

    def __init__(self, pid):
        root = psutil.Process(pid)
        self.processes = [root, *root.children(recursive=True)]

    def command_lines(self):
        """(process, command line) of each that has not ended since it was found."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process, " ".join(process.cmdline())

    def named(self, part):
        """The one descendant whose command line contains `part`."""
        found = [p for p, line in self.command_lines() if part in line and p is not self.processes[0]]
        assert len(found) == 1, f"{part}: {found}"
        return found[0]

    def left(self, within_s=10.0):
        """Those still running after at most `within_s` seconds."""
        _, alive = psutil.wait_procs(self.processes, timeout=within_s)
        return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, what, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)


def send(process, number):
    os.kill(process.pid, getattr(signal, number))
