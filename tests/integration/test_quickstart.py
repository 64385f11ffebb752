"""The main job as a newcomer runs it, and the same on real competition problems. Minutes long: marked slow."""

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
REAL = os.environ.get("METRONOME_REAL_DATA")


def run(*arguments):
    """`metronome run` in this checkout; the run folder and what was printed."""
    name = f"test-{time.time_ns()}"
    command = [METRONOME, "run", *arguments, "--set", f"run.name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "runs" / name, done.stdout


def test_the_quickstart_learns():
    """On the run in METRONOME_RUN (what `make run` left, in .ci/run), else on one of its own."""
    done = os.environ.get("METRONOME_RUN")
    folder = ROOT / done if done else run()[0]
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


@pytest.mark.nightly
@pytest.mark.skipif(
    REAL is None, reason="METRONOME_REAL_DATA is unset: the real problem sets are not part of the project"
)
def test_real_competition_problems_go_through():
    folder, printed = run(
        "infra/recipes/aime.toml",
        "--set",
        f"data.train={REAL}/deepscaler_aime_1983_2023.json",
        "--set",
        f"evaluate.benchmark={REAL}/aime24.json",
        "--set",
        "train.steps=2",
    )
    assert "over-long" in printed
    lines = list(read_lines(folder / "steps.jsonl"))
    assert len(lines) == 2
    assert min(line["response_length_mean"] for line in lines) > 0
    assert [row["benchmark"] for row in read_lines(folder / "evaluations.jsonl")] == ["aime24", "aime24"]
