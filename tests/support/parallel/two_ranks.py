"""The environment of ranks; two ranks of a script, and what they report."""

import json
import os
import subprocess
import sys

from torch.distributed import TCPStore


def rank_environment(rank, world, port=0, local=0):
    """The environment of a rank, as torch elastic gives it; it meets the others in our store at this port."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


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
            env=rank_environment(rank, 2, store.port, local=rank) | {"REPORT": str(path)},
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
