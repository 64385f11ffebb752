"""One rank of several runs (runs.py): `python runs_rank.py JOBS` trains one after the other,
as engine.trainer.rank does."""

import argparse
import os
import sys
from pathlib import Path

import msgpack
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine.config.recipe import load  # noqa: E402
from engine.trainer import rank  # noqa: E402
from engine.wire.control_client import ControlClient  # noqa: E402


def main():
    torch.set_num_threads(1)
    jobs = msgpack.unpackb(Path(sys.argv[1]).read_bytes())
    with rank._session(load(Path(jobs[0][0]) / "config.toml")):
        for folder, address, record in jobs:
            config = load(Path(folder) / "config.toml")
            name = f"trainer-{os.environ['RANK']}"
            control, sender = (ControlClient(address, who, 60.0) for who in (name, f"{name}-weights"))
            arguments = argparse.Namespace(
                folder=Path(folder),
                control=address,
                weights=Path(folder) / "weights",
                threads=1,
                attempt=0,
                resume=False,
                replay=Path(record) if record else None,
            )
            rank._train(config, arguments, control, sender)
            control.close()
            sender.close()
            (Path(folder) / f"done-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    main()
