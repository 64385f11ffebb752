"""A whole run whose trainer ranks are under MindSpeed's adaptor: weights go to an instance, groups come back."""

import pytest

from engine.run.files import read_lines
from support.parallel.runs import RANK, Job, run
from support.runs import config_of

pytestmark = [pytest.mark.ascend, pytest.mark.timeout(200)]


def test_a_periodic_run_is_on_policy(on_host, settings, tmp_path):
    """The instance, which knows nothing of MindSpeed, samples with the weights that the ranks have trained."""
    config = config_of(settings | {"run.name": "run", "parallel.tensor": 2, "train.steps": 3, "train.mode": "periodic"})
    run([Job(config)], 180, rank=(*on_host["mindspeed"], str(RANK)))
    lines = list(read_lines(config.folder / "steps.jsonl"))
    assert [line["versions_seen"] for line in lines] == [[0], [1], [2]]
    assert max(line["max_ratio_gap"] for line in lines) <= 1e-3
    assert max(line["mismatch_kl"] for line in lines) <= 1e-6
    assert len({line["grad_norm"] for line in lines}) == 3
    assert (config.folder / "policy/model.safetensors").exists()
