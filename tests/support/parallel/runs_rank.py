"""One rank of several runs (runs.py): `python runs_rank.py JOBS` trains one after the other,
as engine.trainer.rank does."""

import argparse
import os
import sys
import time
from pathlib import Path

import msgpack
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.client.connection import Connection  # noqa: E402
from engine.config.recipe import load_config  # noqa: E402
from engine.trainer import rank  # noqa: E402
from engine.wire.address import ADDRESS_FILE  # noqa: E402


def main():
    torch.set_num_threads(1)
    jobs = msgpack.unpackb(Path(sys.argv[1]).read_bytes())
    with rank._session(load_config(Path(jobs[0][0]) / "config.toml")):
        for folder, record in jobs:
            config = load_config(Path(folder) / "config.toml")
            plane = connected(Path(folder))
            arguments = argparse.Namespace(
                folder=Path(folder),
                plane=plane.url,
                weights=Path(folder) / "weights",
                threads=1,
                attempt=0,
                resume=False,
                replay=Path(record) if record else None,
            )
            rank._train(config, arguments, plane)
            plane.close()
            (Path(folder) / f"done-{os.environ['RANK']}").touch()


def connected(folder):
    """To the server of a run, once it listens."""
    while not ((folder / ADDRESS_FILE).exists() and (folder / "ranks.token").exists()):
        time.sleep(0.02)
    url = f"http://{(folder / ADDRESS_FILE).read_text().strip()}"
    return Connection(url, (folder / "ranks.token").read_text(), f"trainer-{os.environ['RANK']}", 60.0)


if __name__ == "__main__":
    main()
