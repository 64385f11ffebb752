"""Every list of packages can be installed: the versions exist, and fit what the packages ask for (support/pins.py).

What the packages ask for was read from the package index; `make check-pins` reads it anew.
"""

import copy

import pytest

from support import pins
from support.index import MACHINES, Machine


@pytest.fixture(scope="module")
def known():
    return pins.load()


def changed(known, pin, line):
    """What the packages ask for, with one line more."""
    other = copy.deepcopy(known)
    parts = [part for part in other.values() if pin in part]
    assert parts
    for part in parts:
        part[pin].append(line)
    return other


def test_all_lists_fit(known):
    told, wrong = pins.report(known)
    print("\n".join(told))
    assert wrong == []


def test_what_was_read_is_what_is_pinned(known):
    """No line of the file is left over from an earlier list."""
    for one in MACHINES:
        pinned = {f"{name}=={version}" for which in pins.LISTS for name, version in pins.pins(which, one).items()}
        assert known["any"].keys() | known[str(one)].keys() <= pinned


@pytest.mark.parametrize(
    ("pin", "line", "fault"),
    [
        (
            "vllm-ascend==0.23.0",
            "numpy<2",
            "infra/vllm/npu.txt (3.12 aarch64): vllm-ascend asks for numpy<2, the list has 2.3.5",
        ),
        (
            "einops==0.8.2",
            "left-out>=1",
            "infra/trainer/npu.txt (3.11 x86_64): einops asks for left-out>=1, the list lacks it",
        ),
        ("einops==0.8.2", 'no; sys_platform == "win32"', None),
    ],
)
def test_a_new_conflict_is_told(known, pin, line, fault):
    _, wrong = pins.report(changed(known, pin, line))
    assert (fault in wrong) if fault else (wrong == [])


def test_trainer_and_instances_must_have_one_nccl(known):
    other = copy.deepcopy(known)
    other["any"]["torch==2.12.0"] = ['nvidia-nccl-cu13==2.28.0; platform_system == "Linux"']
    trainer = pins.LISTS[0]
    machine = Machine("3.12", "x86_64")
    monkey = {**pins.pins(trainer, machine), "torch": "2.12.0"}
    assert pins.nccl(trainer, machine, known) != other["any"]["torch==2.12.0"][0].partition(";")[0]
    with pytest.MonkeyPatch.context() as patch:
        real = pins.pins
        patch.setattr(pins, "pins", lambda which, one: monkey if which is trainer else real(which, one))
        _, wrong = pins.report(other)
    assert any(
        line.startswith("NCCL on 3.12 x86_64: the trainer's torch brings nvidia-nccl-cu13==2.28.0") for line in wrong
    )
