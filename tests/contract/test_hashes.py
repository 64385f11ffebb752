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
