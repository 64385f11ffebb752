"""One cell of benchmarks/staleness.py: a real run of the loop at staleness 4 with a loss of batch scope,
its table and plot."""

import json
import math
import subprocess
import sys

import pytest

from support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 8


def test_one_cell(tmp_path):
    given = ["--cell", "4:m2po:0", "--steps", str(STEPS), "--prompts", "3", "--output", str(tmp_path)]
    command = [sys.executable, "benchmarks/staleness.py", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    steps = cell["steps"]
    assert [line["staleness_mean"] for line in steps] == [0, 1, 2, 3, 4, 4, 4, 4]  # exactly max(0, t − 4) behind
    assert steps[0]["old_ratio_max"] == pytest.approx(1, abs=1e-3)
    assert max(line["old_ratio_max"] for line in steps) > 1.05  # stale: the policy has moved since
    assert steps[0]["grad_cosine"] is None
    assert all(-1 <= line["grad_cosine"] <= 1 for line in steps[1:])
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RESULT ")
    figures = json.loads(last.removeprefix("RESULT "))["4:m2po"]
    assert figures["seeds"] == 1
    assert all(math.isfinite(value) for value in figures.values())
    assert 0.1 < figures["final"] <= 1  # the base model has about 0.36
    assert "| 4 | m2po | 1 |" in done.stdout
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")
