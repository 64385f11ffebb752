"""The main job as a newcomer runs it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.run.files import read_lines
from engine.run.trace import read_spans
from engine.tools.timeline import overlapped_steps
from support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
METRONOME = str(Path(sys.executable).parent / "metronome")


def test_the_quickstart_learns():
    """On the run in METRONOME_RUN (what `make run` left, in .ci/run), else on one of its own."""
    folder = ROOT / (os.environ.get("METRONOME_RUN") or f"runs/test-{time.time_ns()}")
    if not folder.exists():
        command = [METRONOME, "run", "--set", f"run.name={folder.name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    base, trained = read_lines(folder / "evaluations.jsonl")
    lines = list(read_lines(folder / "steps.jsonl"))
    assert 0.25 <= base["avg_at_k"] <= 0.45
    assert trained["problems"] == 256
    assert trained["avg_at_k"] >= 0.85
    last = [line["reward_mean"] for line in lines[-5:]]
    assert sum(last) / len(last) >= base["avg_at_k"] + 0.35
    for line in lines:
        assert line["versions_seen"] == [line["step"]]
        assert line["max_ratio_gap"] <= 1e-3
        assert line["mismatch_kl"] <= 1e-6
        assert line["trained_tokens"] > 0
    overlaps = overlapped_steps(read_spans(folder / "trace"))
    assert len(overlaps) == len(lines)
    assert sum(overlaps.values()) >= 0.9 * len(lines)
