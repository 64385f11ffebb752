"""`metronome run` from the command line: real Prefect, real MLflow, real processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

import pytest

from engine.run.files import read_lines
from support.runs import ROOT, Tree, overrides, send, wait_for

METRONOME = [str(Path(sys.executable).parent / "metronome")]


def command(settings, *arguments):
    sets = [part for override in overrides(settings) for part in ("--set", override)]
    return [*METRONOME, "run", "infra/recipes/quickstart.toml", *arguments, *sets]


@pytest.fixture
def small(settings):
    return settings | {
        "run.name": "small",
        "evaluate.problems": 16,
        "evaluate.max_new_tokens": 16,
        "checkpoint.path": str(Path(settings["run.output"]) / "published"),
    }


@pytest.mark.slow
def test_the_whole_pipeline(small, tmp_path):
    even = small["reward.function"]
    small["reward.function"] = ""
    small["reward.functions"] = f'[{{function="{even}", weight=0.5}}, {{function="{even}", weight=0.5, name="again"}}]'
    done = subprocess.run(command(small), capture_output=True, text=True, timeout=230, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "small"
    lines = list(read_lines(folder / "steps.jsonl"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["versions_seen"] == [line["step"]] for line in lines)
    assert all(line["reward/even"] == line["reward/again"] == line["reward_mean"] for line in lines)
    evaluations = list(read_lines(folder / "evaluations.jsonl"))
    assert [row["weight_version"] for row in evaluations] == [0, 3]
    assert all(row["reward/even"] == row["avg_at_k"] for row in evaluations)
    samples = list(read_lines(folder / "responses/step-000002.jsonl"))
    assert all(row["reward/again"] == row["score"] for row in samples)
    for prompt in {row["prompt_id"] for row in samples}:
        group = [row for row in samples if row["prompt_id"] == prompt]
        scores = [row["score"] for row in group]
        wanted = [(score - fmean(scores)) / (stdev(scores) + 1e-6) for score in scores]
        assert [row["advantage"] for row in group] == pytest.approx(wanted, abs=1e-5)
    for row in samples:
        texts = ("".join(row["tokens"]["texts"]), row["response"])  # leaves out end tokens, and joins broken bytes
        whole, text = (re.sub(r"<\|\w+\|>|\ufffd", "", one) for one in texts)
        assert whole.startswith(text)
        assert len(row["tokens"]["logprobs"]) == row["tokens"]["count"]
        assert (row["tokens"]["trained"], row["tokens"]["versions"]) == ([[0, 1]], [[0, 2]])
    assert (folder / "policy/model.safetensors").exists()
    assert "train" in (folder / "timeline.html").read_text()
    assert len(list((folder / "responses").iterdir())) == 3
    marker = next((tmp_path / "published").rglob("_SUCCESS.json"))
    assert all((marker.parent / name).exists() for name in json.loads(marker.read_text())["files"])
    for word in ("reward", "tokens/s", "left", "reward before", "reward after", "timeline.html", "mlflow"):
        assert word in done.stdout, word
    _check_tracking(tmp_path)


def _check_tracking(output):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{output}/mlflow.db")
    [run] = client.search_runs([e.experiment_id for e in client.search_experiments()], "attributes.run_name = 'small'")
    assert run.info.status == "FINISHED"
    for key in ("reward_mean", "reward/again", "max_ratio_gap", "step_s", "tokens_per_s_per_device"):
        assert len(client.get_metric_history(run.info.run_id, key)) == 3
    assert run.data.params["rollout.group_size"] == "4"
    assert client.search_model_versions()


@pytest.mark.nightly
@pytest.mark.parametrize("number", ["SIGINT", "SIGKILL", "SIGTERM"])
def test_killing_the_flow_leaves_no_process_behind(small, tmp_path, number):
    endless = small | {"train.steps": 100_000, "evaluate.problems": 2}
    log = (tmp_path / "output").open("w+")
    flow = subprocess.Popen(command(endless), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        wait_for(lambda: (tmp_path / "small/steps.jsonl").exists(), "the first step", 150)
        tree = Tree(flow.pid)
        assert len(tree.processes) >= 6  # flow, Prefect server, orchestrator, instance, verifier, agent, rank
        send(flow, number)
        code = flow.wait(timeout=30)
        assert tree.left() == []
        log.seek(0)
        output = log.read()
        assert (code, "interrupted" in output) == ((-9, False) if number == "SIGKILL" else (130, True))
        assert "Traceback" not in output
        if number != "SIGKILL":
            assert "\n  resume      " in output
            assert json.loads((tmp_path / "small/failure.json").read_text())["message"] == f"ended by {number}"
            assert "trainer-0" in (tmp_path / "small/timeline.html").read_text()
    finally:
        flow.kill()
        flow.wait()


def test_bad_input_is_refused_before_anything_starts(small, tmp_path):
    """By the console script, in one message. More of what is refused: tests/unit/flows/test_cli.py."""
    bad = command(small | {"model.path": str(tmp_path)})
    done = subprocess.run(
        bad, capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 2, done.stderr
    assert "config.json" in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "small").exists()
