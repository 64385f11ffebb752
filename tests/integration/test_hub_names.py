"""Commands with a model and a dataset by their names on the hub."""

import pytest

from engine.config.recipe import load_config
from support.commands import sets
from support.hub_server import at_hub, hub_server
from support.runs import ROOT, save_problems

TINY = {path.name: path.read_bytes() for path in (ROOT / "data/quickstart_model").iterdir()}


@pytest.fixture
def hub():
    with hub_server() as hub:
        yield hub


def test_a_dry_run_reads_the_sizes_of_a_model_and_no_weights(hub, tmp_path):
    hub.put("models", "team/tiny", TINY)
    keys = sets("run.dry=true", "model.path=team/tiny")
    status, printed, errors = at_hub(hub, tmp_path, "-m", "flows.cli", "run", *keys)
    assert status == 0, errors
    assert "1,017,600 parameters" in printed
    assert {path.rpartition("/")[2] for _, path in hub.requests if "/resolve/" in path} == {"config.json"}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_from_the_hub_and_its_resume_without_it(hub, tmp_path):
    commit = hub.put("models", "team/tiny", TINY)
    hub.put("datasets", "team/sums", {"train.jsonl": save_problems(tmp_path / "sums.jsonl").read_bytes()})
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f"""
        run = {{name = "one", output = "{tmp_path}/runs"}}
        model.path = "team/tiny"
        data = {{train = "team/sums", heldout = "", heldout_fraction = 0.2}}
        rollout = {{group_size = 2, max_new_tokens = 8, max_context = 64}}
        train = {{steps = 1, prompts_per_step = 2}}
        """
    )

    def run(*arguments, **variables):
        return at_hub(hub, tmp_path / "hf", "-m", "flows.cli", "train", recipe, *arguments, **variables)

    status, printed, errors = run()
    assert status == 0, errors
    assert f"download     team/tiny: 3.9 MiB in {tmp_path}/hf/hub/models--team--tiny/snapshots/{commit}" in printed
    assert load_config(tmp_path / "runs/one/config.toml").model.path.endswith(f"/models--team--tiny/snapshots/{commit}")
    hub.put("models", "team/tiny", {**TINY, "notes.txt": b"newer"})
    hub.requests.clear()
    status, printed, errors = run("--resume", "--set", "train.steps=2", HF_HUB_OFFLINE="1")
    assert status == 0, errors
    assert "train.steps = 2 (was 1)" in printed
    assert "model.path" not in printed, "the run has the model that the recipe names"
    assert not hub.requests
