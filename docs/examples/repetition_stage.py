"""A stage of your own: a program that reads responses and writes how much each repeats itself, which enters the reward.

python docs/examples/repetition_stage.py RUN_FOLDER|HOST:PORT [--phrase TOKENS]

Models under reinforcement learning sometimes learn to repeat phrases. The recipe of the run declares the stage:

    [stages.repetition]
    needs = ["responses"]
    gives = ["repetition"]
    reward_weight = -0.5

The trainer waits for the column. A classifier of language or a judge is written in the same way.
"""

import argparse
from collections.abc import Sequence

import numpy as np

from engine.client.service import ServiceClient
from engine.types import Group


def repeated(token_ids: Sequence[int], length: int) -> float:
    """The share of a response's phrases of `length` tokens that it has said before: 0 without a repetition."""
    phrases = [tuple(token_ids[at : at + length]) for at in range(len(token_ids) - length + 1)]
    return 1.0 - len(set(phrases)) / len(phrases) if phrases else 0.0


def judge(group: Group, length: int) -> np.ndarray:
    """[G] numbers for the responses of a group."""
    return np.array([repeated(response.token_ids, length) for response in group.responses], np.float32)


def main() -> None:
    """Write the column for every row, until the run's last step is trained."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="run folder or host:port of `metronome train` or `metronome service`")
    parser.add_argument("--phrase", type=int, default=4, help="tokens of a phrase (4)")
    arguments = parser.parse_args()
    with ServiceClient.init_engines(arguments.run) as plane:
        for lease in plane.rows("repetition"):
            plane.write(lease, {"repetition": [judge(group, arguments.phrase) for group in lease.groups]})
            print(f"step {lease.step}: judged groups {[row.index for row in lease.rows]}", flush=True)


if __name__ == "__main__":
    main()
