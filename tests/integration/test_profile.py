"""Whole runs that profile some steps, and one whose device has no memory left."""

import gzip
import json

import pytest

from support.runs import launch
from support.whole_runs import run, same, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OUT_OF_MEMORY = """
from pathlib import Path
import torch

def gain(terms, coefficients):
    if (Path(__file__).parent / "run/steps.jsonl").exists():  # in the second step
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.11 GiB.")
    return terms.advantages * (terms.logprobs - terms.old).exp(), torch.zeros_like(terms.logprobs, dtype=torch.bool)
"""


def events_of(file):
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_profile_has_the_phases_of_its_steps_and_changes_no_weight(settings, tmp_path):
    exact = settings | {"rollout.deterministic": True, "train.consume": "prompt_order", "train.steps": 4}
    for name, steps in (("plain", []), ("profiled", [1, 2])):
        run(exact | {"run.name": name, "train.profile": steps}, tmp_path)
    assert same(weights(tmp_path, "profiled"), weights(tmp_path, "plain"))
    assert not (tmp_path / "plain/profile").exists()
    of_instance, of_rank = sorted((tmp_path / "profiled/profile").iterdir())
    assert (of_instance.name, of_rank.name) == ("instance-0.json.gz", "rank-0.json.gz")
    assert "aten::linear" in {event["name"] for event in events_of(of_instance)}
    spans = [event["name"] for event in events_of(of_rank) if event.get("cat") == "user_annotation"]
    assert [spans.count(name) for name in ("sync", "check", "reduce", "optimizer")] == [2, 2, 2, 2]
    assert spans.count("forward") >= spans.count("backward") >= 2  # the fixed tokens are a forward pass, too
    assert {"wait", "score"} <= set(spans)


def test_a_rank_without_memory_ends_the_run_with_one_error_that_names_keys(settings, tmp_path):
    (tmp_path / "loss.py").write_text(OUT_OF_MEMORY)
    spent = {"algorithm.loss": f"{tmp_path}/loss.py:gain", "train.ratio_gap_limit": 0}
    code, output = launch(settings | spent, tmp_path)
    assert code == 1
    (line,) = [line for line in output.splitlines() if "ran out of memory" in line]
    assert line.startswith("error: DeviceMemoryError: trainer-0 ran out of memory in step 1: ")
    assert "where the dry run counts weights" in line
    assert "Tried to allocate 2.00 GiB" in line
    assert "Traceback" not in output
    told = json.loads((tmp_path / "run/failure.json").read_text())
    assert told["error"] == "DeviceMemoryError"
    assert "Tried to allocate" in (tmp_path / "run/logs/trainer-0-memory.txt").read_text()
