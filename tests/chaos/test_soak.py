"""Growth of processes is seen in doctored samples, and none where there is none."""

import os
import random

import psutil
import pytest

from chaos.soak import KIB_PER_STEP, Sample, growth, slope, take, verdict

STEPS = range(0, 4000, 10)


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
        for step in STEPS
    ]


def test_a_slope_is_that_of_a_line():
    assert slope([(x, 3 * x + 1) for x in range(10)]) == pytest.approx(3)
    assert slope([(1, 2)]) == 0


def test_a_process_that_does_not_grow():
    assert verdict({"orchestrator": growth(samples())}, log_bytes_per_step=200, zombies=[]) == []


@pytest.mark.parametrize(
    ("grown", "key"),
    [
        ({"memory": KIB_PER_STEP * 1100}, "kib_per_step"),
        ({"shared": KIB_PER_STEP * 1100}, "shared_kib_per_step"),
        ({"descriptors": 0.002}, "descriptors"),
        ({"threads": 0.002}, "threads"),
    ],
)
def test_a_process_that_grows(grown, key):
    [problem] = verdict({"orchestrator": growth(samples(**grown))}, log_bytes_per_step=0, zombies=[])
    assert problem.startswith(f"orchestrator: {key}")


def test_logs_and_zombies():
    quiet = {"orchestrator": growth(samples())}
    assert "MB an hour" in verdict(quiet, log_bytes_per_step=17_000, zombies=[])[0]
    assert verdict(quiet, log_bytes_per_step=0, zombies=["rank 12"]) == ["zombie: rank 12"]


def test_a_sample_is_of_the_process():
    found = take(psutil.Process(os.getpid()), step=3)
    assert found.step == 3
    assert found.memory > 1 << 20
    assert found.descriptors >= 3
    assert found.threads >= 1
