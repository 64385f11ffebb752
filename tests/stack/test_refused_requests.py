"""A Prefect server that refuses a request in the middle of a deploy: the same command repairs it."""

import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from support.flow_runs import patiently
from support.runs import ROOT
from support.s3_proxy import FORBID, s3_proxy
from tasks.cluster.prefect_api import post_json

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOY = [sys.executable, "-m", "flows.cli", "deploy", "--name", "kept"]
CHANGES = ["--set", "train.steps=7", "--training", "30 3 * * *", "--notify", "http://127.0.0.1:9/hook"]


@pytest.fixture
def proxy(environment):
    """(proxy in front of the Prefect server, the environment of a client of it)."""
    there = urlsplit(environment["PREFECT_API_URL"])
    with s3_proxy(there.hostname, there.port) as between:
        yield between, {**environment, "PREFECT_API_URL": f"{between.url}/api"}


def deploy(environment, *given):
    return subprocess.run([*DEPLOY, *given], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("only", ["(POST /api/deployments/|PATCH /api/deployments/[^/]+)$", "POST /api/automations/$"])
def test_the_same_command_repairs_a_deploy_that_failed_midway(environment, proxy, only):
    between, through = proxy
    assert deploy(environment, "--training", "0 1 * * *").returncode == 0
    between.spoil(FORBID, 0, 0, only=only)
    told = deploy(through, *CHANGES)
    assert between.requests, "nothing was refused"
    assert told.returncode == 1, told.stdout[-2000:]
    assert "403" in told.stderr
    assert "Traceback" not in told.stderr
    between.heal()
    done = deploy(through, *CHANGES)
    assert done.returncode == 0, done.stderr[-3000:]
    there = {
        one["name"]: one for one in patiently(post_json, f"{environment['PREFECT_API_URL']}/deployments/filter", {})
    }
    assert there["kept-nightly"]["parameters"]["overrides"] == ["train.steps=7"]
    assert [one["schedule"]["cron"] for one in there["kept-nightly"]["schedules"]] == ["30 3 * * *"]
