"""What a run does with a Prefect server that it has started itself: `metronome run` without PREFECT_API_URL."""

import os
import subprocess
import sys

import pytest

from support.runs import ROOT

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

RUN = """
import sys
from pathlib import Path
from tasks.cluster.local_server import local_server

with local_server(Path(sys.argv[1])) as wait:
    wait()
    from tasks.cluster.devices import hold_devices
    with hold_devices(16, wait_s=20):
        print("held")
"""


def test_npus_need_no_limit_on_it(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.stdout.splitlines()[-1:] == ["held"], done.stderr
