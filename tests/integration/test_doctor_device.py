"""`metronome doctor --device` on the CPU: a report of all parts, as a user would post it."""

import json
import os
import subprocess
import sys

import pytest

from engine.tools.acceptance.supervisor import NAMES
from support.runs import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_whole_report_on_a_cpu(tmp_path):
    out = tmp_path / "report.json"
    settings = ("platform.device=cpu", "rollout.engine=embedded", f"run.output={tmp_path / 'runs'}")
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "doctor", "--device", "--out", str(out)]
        + [word for one in settings for word in ("--set", one)],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    parts = {part["part"]: part for part in found["parts"]}
    assert tuple(parts) == NAMES
    assert {part["status"] for part in parts.values()} == {"ok"}
    assert parts["versions"]["figures"]["platform"] == "cpu"
    assert all(one["right"] for one in parts["kernels"]["figures"]["comparisons"])
    assert parts["broadcast"]["figures"]["gb_per_s"] > 0
    assert parts["completion"]["figures"]["tokens"] == 64
    sync = parts["weight sync"]["figures"]
    assert (sync["transport"], sync["bytes"]) == ("gloo", pytest.approx(4 * 12.8e6, rel=0.05))
    assert sync["ratio"] == pytest.approx(sync["sync_s"] / sync["bare_s"])
    assert parts["training step"]["figures"]["mfu"] is None
    assert parts["training step"]["figures"]["tokens_per_s"] > 0
    assert parts["sync against periodic"]["figures"]["weights_equal"]
    assert parts["sync against periodic"]["figures"]["ratio"] > 0.5
    for number, name in enumerate(NAMES, 1):
        assert f"## {number}/8 {name}: ok" in done.stdout
    assert "8 ok, in " in done.stdout
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
