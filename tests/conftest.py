"""What tests share: a tiny random model made by our own code, and runs of the real launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("busy", deadline=None)  # a busy machine makes no example slow
hypothesis.settings.load_profile("busy")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _own_tracking_store():
    """MLflow's set_tracking_uri sets this variable, and runs of a later test would go there."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Qwen3 of 0.2 M parameters with the byte-level tokenizer, as a Hugging Face folder."""
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory):
    """The same with more layers: several buckets of 1 MiB for each of two pipeline stages."""
    return save_model(tmp_path_factory.mktemp("model") / "deep", intermediate_size=1024, num_hidden_layers=8)


def save_model(folder, **sizes):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from engine.base_model.tokenizer import build

    tokenizer = build(512)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        **{"intermediate_size": 128, "num_hidden_layers": 2, **sizes}, vocab_size=260, hidden_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def megatron():
    """One CPU rank's session, for tests that build models of Megatron."""
    from engine import platform

    with platform.single(platform.get("cpu")):
        yield


@pytest.fixture
def no_grad():
    """As in the process of an instance."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    """Forty additions in DeepScaleR's schema."""
    import json

    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [{"problem": f"{n}+{n * 7 % 41}=", "answer": str(n + n * 7 % 41), "solution": ""} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    """Prefect server, MLflow server and S3 endpoint on free ports, one set for all tests (tasks.services.Services)."""
    from tasks.services import Services

    with Services(tmp_path_factory.mktemp("services")) as running:
        running.environment["PREFECT_WORKER_QUERY_SECONDS"] = "2"  # a worker asks for runs every 10 s without it
        yield running


@pytest.fixture(scope="session")
def environment(services):
    """The whole environment for a process that is to find them."""
    return {**os.environ, **services.environment, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture
def settings(tiny_model, problems, tmp_path):
    """Those of `base_settings`, for a test's own folder."""
    return base_settings(tiny_model, problems, tmp_path)


def base_settings(model, problems, folder):
    """Overrides of a run of a few seconds whose rewards vary although the model is random."""
    return {
        "run.name": "run",
        "run.output": str(folder),
        "model.path": str(model),
        "data.train": str(problems),
        "data.heldout": str(problems),
        "reward.function": f"{ROOT / 'tests/rewards.py'}:even",
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


def overrides(settings):
    return [f"{key}={value!s}".replace("=True", "=true").replace("=False", "=false") for key, value in settings.items()]


def config_of(settings):
    from engine.recipe import load

    return load(None, overrides(settings))


def write_config(settings, folder):
    from engine.recipe import dump

    path = Path(folder) / f"{settings['run.name']}.toml"
    dump(config_of(settings), path)
    return path


def launch(settings, folder, *arguments):
    """Run the launcher to its end: (exit code, output)."""
    command = [sys.executable, "-m", "engine.launch", "--config", str(write_config(settings, folder)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


class Tree:
    """A process and all its descendants, found while it lives, so that orphans can be looked for after its end."""

    def __init__(self, pid):
        root = psutil.Process(pid)
        self.processes = [root, *root.children(recursive=True)]

    def named(self, part):
        """The one descendant whose command line contains `part`."""
        found = [p for p in self.processes[1:] if part in " ".join(p.cmdline())]
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
