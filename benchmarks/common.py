"""Functions that several benchmarks use: models, runs of the orchestrator, and access to internals of the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from engine import platform
from engine.config import Config
from engine.config.recipe import HOME, load_config
from engine.platform.base import Accelerator
from engine.run.folder import dump_config

if TYPE_CHECKING:
    from engine.trainer.policy import Policy

CACHE = HOME / "runs"
"""Folder for models and environments that benchmarks make once. git ignores it."""
QUICKSTART_MODEL = HOME / "data/quickstart_model"
"""The quickstart's base model, which comes with Metronome."""


def reset_peak(machine: platform.Platform) -> None:
    """Restart the count of `machine.peak_bytes`. On a CPU only Linux can (proc(5))."""
    if isinstance(machine, Accelerator):
        machine.api().reset_peak_memory_stats()
    elif (file := Path("/proc/self/clear_refs")).exists():
        file.write_text("5")


def byte_tokenizer(context: int) -> PreTrainedTokenizerBase:
    """The quickstart's tokenizer (256 bytes, four special tokens) for a model of `context` tokens."""
    return AutoTokenizer.from_pretrained(QUICKSTART_MODEL, model_max_length=context)


def run_orchestrator(settings: Mapping[str, Any], recipe: str | None = None, timeout_s: float = 600.0) -> Config:
    """Run the real orchestrator, in processes of its own, to its end. Returns its config; raises if it fails."""
    config = load_config(recipe, [f"{key}={value}" for key, value in settings.items()])
    orchestrate(config, timeout_s)
    return config


def orchestrate(config: Config, timeout_s: float = 600.0) -> None:
    """The same for a config."""
    path = Path(config.run.output) / f"{config.run.name}.toml"
    dump_config(config, path)
    command = [sys.executable, "-m", "engine.orchestrator.launch", "--config", str(path)]
    subprocess.run(command, check=True, timeout=timeout_s, cwd=HOME, env={**os.environ, "OMP_NUM_THREADS": "1"})


# the training side in this process ----------------------------------------------------------------


@contextmanager
def one_rank() -> Iterator[None]:
    """Be the only rank of a trainer on the CPU, with one computing thread."""
    torch.set_num_threads(1)
    with platform.single_session(platform.get_platform("cpu")):
        yield


def random_qwen3(folder: Path, hidden: int, layers: int, vocabulary: int, context: int = 16384) -> Path:
    """A random tied Qwen3 with heads of size 64 (hidden / 8 if that is smaller), two queries per key, an MLP of
    3 · hidden, and no tokenizer."""
    torch.manual_seed(0)
    head_dim = min(64, hidden // 8)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=hidden // head_dim // 2,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def build_policy(model: Path, shared_prompt: bool, micro_batch_tokens: int) -> Policy:
    """The trainer's policy without frozen copies, so that `accumulate` is one forward, loss and backward."""
    from engine.trainer.policy import Policy

    config = load_config(
        None,
        [
            f"model.path={model}",
            "algorithm.old_policy=behavior",
            "algorithm.kl_coef=0.0",
            f"attention.shared_prompt={str(shared_prompt).lower()}",
            f"train.micro_batch_tokens={micro_batch_tokens}",
        ],
    )
    return Policy(config, platform.get_platform("cpu"))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients that `accumulate` has added up, by Hugging Face's names, without the step's denominator."""
    from engine.model.hf_weights import export_weights

    found = {name: parameter.main_grad for name, parameter in policy.models.policy.named_parameters()}
    return dict(export_weights(found, policy.models.policy, policy.models.shape))


def alternating(sides: Mapping[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each side's calls. The sides take turns; a first call of each warms up and does not count.

    With one computing thread, CPU seconds are the time of a call on a free core. Other jobs on the machine disturb them
    less than wall time.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name, call in sides.items():
            started = time.process_time()
            call()
            if number:
                found[name].append(time.process_time() - started)
    return found


def result(figures: Mapping[str, Any]) -> None:
    """Print the last line of a benchmark."""
    print("RESULT " + json.dumps(figures), flush=True)
