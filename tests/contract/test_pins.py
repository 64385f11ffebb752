"""Every list of packages can be installed: the versions exist, and fit what the packages ask for (support/pins.py).

What the packages ask for was read from the package index; `make check-pins` reads it anew.
"""

import pytest

from support import pins
from support.index import MACHINES


@pytest.fixture(scope="module")
def known():
    return pins.load()


def test_all_lists_fit(known):
    told, wrong = pins.report(known)
    print("\n".join(told))
    assert wrong == []


def test_what_was_read_is_what_is_pinned(known):
    """No line of the file is left over from an earlier list."""
    for one in MACHINES:
        pinned = {f"{name}=={version}" for which in pins.LISTS for name, version in pins.pins(which, one).items()}
        assert known["any"].keys() | known[str(one)].keys() <= pinned
