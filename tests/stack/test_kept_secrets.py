"""A whole run with secrets of every kind: none is in a file, in an argument of a process, or in what is said."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.runs import ROOT, overrides

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(400)]

METRONOME = str(Path(sys.executable).parent / "metronome")
POLL_S = 0.1
END_S = 300.0
SECRETS = {
    "METRONOME_TOKEN": "sentinel-of-the-servers",
    "AWS_SECRET_ACCESS_KEY": "sentinel-of-the-bucket",
    "AWS_SESSION_TOKEN": "sentinel-of-the-session",
    "MLFLOW_TRACKING_USERNAME": "someone",
    "MLFLOW_TRACKING_PASSWORD": "sentinel-of-mlflow",
    "HF_TOKEN": "sentinel-of-the-hub",
    "JUDGE_KEY": "sentinel-of-the-judge",
}


def arguments_while(command, secrets, **options):
    """Run a command to its end: (exit code, output, command lines of it and its descendants with a secret in them)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    root = psutil.Process(process.pid)
    deadline = time.monotonic() + END_S
    seen = set()
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{command} did not end within {END_S} s"
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        seen.add(" ".join(one.cmdline()))
            time.sleep(POLL_S)
        output = process.stdout.read()
    finally:
        process.kill()
        process.wait()
    assert any("trainer.rank" in line for line in seen), output  # the processes of the run were looked at
    return process.returncode, output, [line for line in seen if any(secret in line for secret in secrets)]


def files_with(secrets, *folders):
    """(file, secret) of each file below the folders that has one of the texts in it."""
    found = []
    looked_at = 0
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        content = file.read_bytes()
        looked_at += 1
        found += [(str(file), secret) for secret in secrets if secret.encode() in content]
    return looked_at, found


def test_no_secret_leaves_the_environment(settings, services, environment, tmp_path):
    """Config, responses, traces, checkpoints here and in the bucket, MLflow's and Prefect's stores and all logs."""
    given = environment | SECRETS
    address = given["MLFLOW_TRACKING_URI"].replace("://", "://someone:sentinel-of-the-address@")
    given["MLFLOW_TRACKING_URI"] = address
    secrets = [value for name, value in SECRETS.items() if name != "MLFLOW_TRACKING_USERNAME"]
    secrets.append("sentinel-of-the-address")
    secrets.append(environment["PREFECT_API_AUTH_STRING"].partition(":")[2])
    run = settings | {
        "run.name": "kept",
        "train.steps": 2,
        "rollout.max_new_tokens": 8,
        "reward.function": f"{ROOT / 'tests/support/rewards.py'}:sees_its_key_only",
        "reward.environment": '["JUDGE_KEY"]',
        "checkpoint.every": 1,
        "checkpoint.path": "s3://metronome/kept",
        "evaluate.problems": 4,
        "evaluate.max_new_tokens": 8,
    }
    sets = [part for override in overrides(run) for part in ("--set", override)]
    code, said, told = arguments_while([METRONOME, "run", *sets], secrets, cwd=ROOT, env=given)
    assert code == 0, said
    assert told == []
    assert [line for line in said.splitlines() if any(secret in line for secret in secrets)] == []
    bucket = tmp_path / "bucket"
    subprocess.run([sys.executable, "-c", COPY, "s3://metronome/kept", str(bucket)], env=given, check=True, timeout=100)
    assert list(bucket.rglob("_SUCCESS.json"))
    looked_at, found = files_with(secrets, tmp_path, services.folder)
    assert looked_at > 20
    assert found == []


COPY = """
import sys
import fsspec
s3, root = fsspec.core.url_to_fs(sys.argv[1])
s3.get(root, sys.argv[2], recursive=True)
"""
