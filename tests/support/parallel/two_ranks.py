"""Two ranks of a script, and what they report."""

import json
import os
import subprocess
import sys

from torch.distributed import TCPStore


def ranks(folder, script, overrides, *arguments):
    """What two ranks that run a script report."""
    return reports(folder, [sys.executable, str(script), json.dumps(overrides), *map(str, arguments)])


def reports(folder, command):
    """What two ranks started by a command write to the file REPORT; the store's port is free because it is ours."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = [folder / f"rank-{rank}.json" for rank in range(2)]
    started = [
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "REPORT": str(path),
            },
        )
        for rank, path in enumerate(paths)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(path.read_text()) for path in paths]
