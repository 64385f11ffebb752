"""What goes wrong in a run stands on the console of its command: one line of each kind, repeated with its count."""

import re
import subprocess
import sys

import pytest

from engine.algorithm.alignment import RECENT
from engine.run.files import read_lines
from support.commands import sets
from support.runs import ROOT, Tree, base_settings, overrides, send, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6
REWARD = """
import time

def reward(prompt, responses):
    number = int(prompt.problem.partition("+")[0])
    if number == 7:
        time.sleep(1000)
    if number % 3 == 0:
        raise ValueError("no score for this one")
    return [1.0 for _ in responses]
"""


@pytest.fixture(scope="module")
def console(tiny_model, problems, tmp_path_factory):
    """The lines that `metronome train` printed into a file, and the lines of steps.jsonl, of a run whose reward fails,
    hangs once, and else gives the same score to each response. Its instance dies after the first step."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "reward.py").write_text(REWARD)
    keys = base_settings(tiny_model, problems, folder / "runs") | {
        "reward.function": f"{folder / 'reward.py'}:reward",
        "reward.on_error": "zero",
        "reward.timeout_s": 3,
        "train.prompts_per_step": 8,
        "train.steps": STEPS,
    }
    steps = folder / "runs/run/steps.jsonl"
    command = [sys.executable, "-m", "flows.cli", "train", "infra/recipes/quickstart.toml", *sets(*overrides(keys))]
    with (folder / "told").open("w") as told:
        run = subprocess.Popen(command, stdout=told, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        wait_for(lambda: run.poll() is not None or (steps.exists() and steps.read_text()), "the first step", 400)
        send(Tree(run.pid).named("engine.instance.embedded"), "SIGKILL")
        assert run.wait(400) == 0, (folder / "told").read_text()
    finally:
        run.kill()
        run.wait()
    return (folder / "told").read_text().splitlines(), list(read_lines(steps))


def lines_of(console, stage, what):
    """The (count, of) of each line about a share, in order."""
    found = [re.fullmatch(rf"{stage:<12} ([\d,]+) of ([\d,]+) {what}", line) for line in console[0]]
    return [tuple(int(part.replace(",", "")) for part in one.groups()) for one in found if one]


def test_responses_that_were_cut_are_told(console):
    what = r"responses were cut at 16 tokens \(max_new_tokens\) or by the context"
    cut, of = lines_of(console, "responses", what)[-1]
    assert 0 < cut <= of == STEPS * 8 * 4


def test_an_instance_that_dies_and_comes_back_is_told_in_a_line_each(console):
    lines = [line for line in console[0] if line.startswith("instances ")]
    assert len([line for line in lines if "SIGKILL" in line or "signal 9" in line]) == 1, lines
    assert all("\x1b" not in line and "\r" not in line for line in console[0])


def test_gradients_that_leave_their_on_policy_range_are_told_in_a_line(tiny_model, problems, tmp_path):
    """With a threshold that any gradient exceeds: from the trainer's report to the console and the run folder."""
    keys = base_settings(tiny_model, problems, tmp_path) | {
        "rollout.max_new_tokens": 4,
        "train.prompts_per_step": 2,
        "train.steps": RECENT + 2,
        "algorithm.gradient_control": "measure",
        "algorithm.gac_low": 1e-6,
    }
    command = [sys.executable, "-m", "flows.cli", "train", "infra/recipes/quickstart.toml", *sets(*overrides(keys))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    said = rf"step {RECENT}: the \|cosine\| of consecutive gradients, (0\.\d+) on average over {RECENT} steps, has left"
    (line,) = [line for line in done.stdout.splitlines() if "cosine" in line and line.startswith("training")]
    mean = re.search(said, line)
    assert mean is not None, line
    (notice,) = [row for row in read_lines(tmp_path / "run/logs/notices.jsonl") if row["stage"] == "training"]
    assert notice["text"] in line
    cosines = [row.get("grad_cosine") for row in read_lines(tmp_path / "run/steps.jsonl")]
    assert cosines[0] is None  # the first gradient has none before it
    assert float(mean[1]) == pytest.approx(sum(map(abs, cosines[1 : RECENT + 1])) / RECENT, abs=1e-3)
