"""vllm-ascend's own sampler, from its wheel, on a CPU: it ignores --logprobs-mode, and changed as in an instance it
reports log softmax(logits / temperature) before top_p."""

import json
import re
import subprocess
import sys

import pytest

from support.published import wheel
from support.runs import ROOT

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests/support/ascend/sampler.py"
RUNNER = "vllm_ascend/worker/model_runner_v1.py"


@pytest.fixture(scope="module")
def ascend():
    return wheel("vllm-ascend", "0.23.0")


@pytest.fixture(scope="module")
def published(ascend, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    for file in re.findall(r'^    "(vllm.*\.py)",$', SCRIPT.read_text(), re.MULTILINE):
        source = ascend if file.startswith("vllm_ascend") else wheel("vllm", "0.23.0")
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(source.read(file))
    return folder


def test_its_runner_gives_its_sampler_no_mode(ascend):
    """The change can go from the release on that gives it one, if it then reports those before top_p."""
    source = ascend.read(RUNNER).decode()
    assert re.findall(r"AscendSampler\((.*)\)", source) == [""]
    assert "logprobs_mode" not in source


def test_it_reports_what_the_trainer_computes_once_it_is_changed(published):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(published)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["ours"]) == 4
    for *case, given, _, right in found["ours"]:
        assert given == pytest.approx(right, abs=1e-6), case
    for *case, given, plain, _ in found["published"]:  # without the change an instance is refused at its start
        assert given == pytest.approx(plain, abs=1e-6), case
