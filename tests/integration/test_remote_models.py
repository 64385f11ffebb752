"""Commands with a model and a dataset by their names on the hub, and a run whose model is on S3."""

import os
import subprocess
import sys

import boto3
import pytest

from engine.config.recipe import load_config
from support.commands import sets
from support.hub_server import at_hub, hub_server
from support.runs import ROOT, save_problems
from support.s3_server import s3_server
from tasks.cluster.ray.models import find_digests

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


SOURCE = ROOT / "data/quickstart_model"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_from_s3_learns_what_it_learns_from_the_folder_and_goes_on_without_s3(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f"""
        run = {{name = "there", output = "{tmp_path}/runs"}}
        model.path = "s3://bucket/models/tiny"
        reward.function = "exact"
        rollout = {{group_size = 8, max_new_tokens = 48, max_context = 128, deterministic = true}}
        train = {{steps = 1, prompts_per_step = 8, consume = "prompt_order", learning_rate = 1e-3}}
        """
    )

    def train(*arguments, status=0):
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "train", str(recipe), *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "COLUMNS": "200"},
        )
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout

    with s3_server() as address:
        client = boto3.client("s3", endpoint_url=address)
        client.create_bucket(Bucket="bucket")
        for path in SOURCE.iterdir():
            client.upload_file(str(path), "bucket", f"models/tiny/{path.name}")
        printed = train()
        copies = tmp_path / "hf/metronome-s3/bucket/models"
        assert f"s3://bucket/models/tiny: 3.9 MiB in {copies}/tiny@" in printed
        [copy] = [path for path in copies.iterdir() if path.is_dir()]
        assert load_config(tmp_path / "runs/there/config.toml").model.path == str(copy)
        assert find_digests(copy) == find_digests(SOURCE)
        changed = bytearray((SOURCE / "model.safetensors").read_bytes())
        changed[-4] ^= 1
        client.put_object(Bucket="bucket", Key="models/tiny/model.safetensors", Body=bytes(changed))
        more = ["--set", "train.steps=2"]
        told = train("--resume", *more, "--set", "model.path=s3://bucket/models/tiny", status=2)
        assert "the weights or the config.json of the base model (model.path)" in told
    train("--set", "run.name=here", "--set", f"model.path={SOURCE}")
    there, here, base = map(find_digests, (tmp_path / "runs/there/policy", tmp_path / "runs/here/policy", SOURCE))
    assert there == here
    assert there["model.safetensors"] != base["model.safetensors"]
    printed = train("--resume", *more)
    assert "train.steps = 2 (was 1)" in printed
    assert "model.path" not in printed, "the run has the model that the recipe names"
