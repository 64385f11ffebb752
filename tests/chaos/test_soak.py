"""Growth of processes is seen in doctored samples, and none where there is none."""

import random

import pytest

from chaos.soak import KIB_PER_STEP, Sample, growth, verdict


def samples(memory=0.0, shared=0.0, descriptors=0.0, threads=0.0):
    """Of a process that grows by so many bytes, files and threads a step, with the noise of an allocator."""
    draw = random.Random(0)
    return [
        Sample(
            step=step,
            memory=int(3e8 + memory * step + draw.uniform(0, 2e6)),
            shared=int(shared * step),
            descriptors=30 + int(descriptors * step),
            threads=8 + int(threads * step),
        )
        for step in range(0, 4000, 10)
    ]


@pytest.mark.parametrize(
    ("grown", "log_bytes", "zombies", "said"),
    [
        ({}, 200, [], None),
        ({"memory": KIB_PER_STEP * 1100}, 200, [], "orchestrator: kib_per_step"),
        ({"shared": KIB_PER_STEP * 1100}, 200, [], "orchestrator: shared_kib_per_step"),
        ({"descriptors": 0.002}, 200, [], "orchestrator: descriptors"),
        ({"threads": 0.002}, 200, [], "orchestrator: threads"),
        ({}, 17_000, [], "logs grow by 1.02 MB an hour"),
        ({}, 0, ["rank 12"], "zombie: rank 12"),
    ],
)
def test_what_grows_is_named(grown, log_bytes, zombies, said):
    found = verdict({"orchestrator": growth(samples(**grown))}, log_bytes, zombies)
    assert [problem[: len(said or "")] for problem in found] == ([said] if said else [])
