"""Every package of constraints.txt has hashes, and the images install no other file of it (support/hashes.py)."""

import re

import pytest

from support import hashes, pins
from support.index import MACHINES
from support.runs import ROOT

CONTAINERS = sorted((ROOT / "infra/containers").glob("*.Containerfile"))


def test_every_pinned_package_has_hashes():
    pinned = {f"{name}=={version}" for name, version in pins.pins(hashes.LIST, MACHINES[0]).items()}
    images = hashes.lines(hashes.IMAGES)
    tests = hashes.lines(hashes.TESTS)
    assert images.keys() | tests.keys() == pinned, "make hashes"
    assert not images.keys() & tests.keys()
    assert {pin.partition("==")[0] for pin in images} == hashes.needed(), "make hashes"
    assert all({**images, **tests}.values())


@pytest.mark.parametrize("name", ["torch", "numpy", "msgspec", "xxhash", "cryptography", "multiprocess"])
def test_wheels_of_both_architectures_and_both_pythons_are_there(name):
    (found,) = [one for pin, one in hashes.lines(hashes.IMAGES).items() if pin.startswith(f"{name}==")]
    assert len(found) >= 4


def test_the_files_name_no_index():
    for file in (hashes.IMAGES, hashes.TESTS):
        assert "://" not in file.read_text()


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_images_take_packages_by_hash_first(path):
    (install,) = re.findall(r"^RUN python3 -m venv.*|^RUN source .*", path.read_text().replace("\\\n", ""), re.M)
    steps = [step.strip() for step in install.split("&&")]
    (hashed,) = [place for place, step in enumerate(steps) if "--require-hashes --requirement" in step]
    assert "--no-deps" in steps[hashed]
    before = [step for step in steps[:hashed] if re.search(r"pip install|install\.sh", step)]
    assert all("\"$(grep '^torch==' constraints.txt)\"" in step for step in before)


def file(name, python=None):
    return {"filename": name, "hashes": {"sha256": name}, "requires-python": python}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("one-1.0-py3-none-any.whl", True),
        ("one-1.0-py2.py3-none-any.whl", True),
        ("one-1.0-py311-none-any.whl", True),
        ("one-1.0-py312-none-manylinux_2_28_aarch64.whl", True),
        ("one-1.0-py310-none-any.whl", True),
        ("one-1.0-py313-none-any.whl", False),
        ("one-1.0-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
        ("one-1.0-cp311-none-any.whl", True),
        ("one-1.0-cp310-none-any.whl", False),
        ("one-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", True),
        ("one-1.0-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("one-1.0-cp38-abi3-manylinux_2_28_x86_64.whl", True),
        ("one-1.0-cp313-abi3-manylinux_2_28_x86_64.whl", False),
        ("one-1.0-cp313-cp313-manylinux_2_28_x86_64.whl", False),
        ("one-1.0-cp312-cp312-manylinux_2_39_x86_64.whl", False),
        ("one-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("one-1.0-cp311-cp311-win_amd64.whl", False),
        ("one-1.1-py3-none-any.whl", False),
        ("one-1.0.tar.gz", True),
        ("one-1.1.tar.gz", False),
    ],
)
def test_files_that_a_container_may_install_are_taken(name, taken):
    assert (name in {one["filename"] for one in hashes.chosen([file(name)], "1.0")}) == taken
