"""SmolLM2-135M-Instruct, a real pretrained model: made from the package index, trained by its recipe."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.run.files import read_lines
from support.runs import ROOT

pytestmark = pytest.mark.timeout(1800)
MODEL = ROOT / "data/smollm2"


@pytest.fixture(scope="module")
def model():
    """data/smollm2, made if it is not there: a download of 98 MB."""
    if not MODEL.exists():
        made = subprocess.run([sys.executable, "-m", "data.make_smollm2"], cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        assert "its logits equal those of" in made.stdout
    return MODEL


def run_recipe(command, folder, recipe="smollm2", **settings):
    """`metronome run` or `metronome train` of a recipe, to its end."""
    given = {"run.output": folder, "run.name": "run", **settings}
    arguments = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    metronome = [sys.executable, "-c", "from flows.main import main; main()", command, f"infra/recipes/{recipe}.toml"]
    done = subprocess.run([*metronome, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_the_written_model_answers_as_an_instruct_model_does(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = network.generate(**tokens, max_new_tokens=16, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_two_steps_of_the_recipe_are_on_policy(model, tmp_path):
    """Few responses, of which none may be right; so their rewards are such as differ, and the weights change."""
    small = {"train.prompts_per_step": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 16}
    small["reward.function"] = f"{ROOT}/tests/support/rewards.py:even"
    run_recipe("train", tmp_path, **{"train.steps": 2, "checkpoint.every": 0, **small})
    steps = list(read_lines(tmp_path / "run/steps.jsonl"))
    assert [step["versions_seen"] for step in steps] == [[0], [1]]
    assert all(step["max_ratio_gap"] <= 1e-3 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)
    assert json.loads((tmp_path / "run/policy/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_raises_the_accuracy_so_far_that_the_intervals_are_apart(model, tmp_path, seed):
    run_recipe("run", tmp_path, **{"run.seed": seed})
    before, *_, after = read_lines(tmp_path / "run/evaluations.jsonl")
    assert before["problems"] == after["problems"] == 128
    assert before["ci_high"] < after["ci_low"]


@pytest.mark.nightly
def test_the_model_learns_to_call_a_tool(model, tmp_path):
    """From next to no valid call to nearly all responses. Most of these calls are right, and their results are said:
    without that a response has at most 0.7."""
    run_recipe("run", tmp_path, recipe="smollm2_tool")
    before, *_, after = read_lines(tmp_path / "run/evaluations.jsonl")
    assert before["problems"] == after["problems"] == 128
    assert before["ci_high"] < after["ci_low"]
    first, *_, last = read_lines(tmp_path / "run/steps.jsonl")
    assert first["reward/valid_calls"] < 0.1
    assert last["reward/valid_calls"] > 0.9
    assert first["reward/right_calls"] < 0.1 < 0.5 < last["reward/right_calls"]
    assert after["avg_at_k"] > 0.7
