"""The limit of open files, in a process of its own: a limit that was lowered can't be raised again."""

import resource
import subprocess
import sys

import pytest

from engine.run.disk import ENOUGH

RAISE = """
import resource
from engine.run.disk import raise_limit, reachable_limit
print(reachable_limit())
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1000), (1000, 1000)])
def test_the_soft_limit_becomes_the_hard_one(soft, hard):
    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run([sys.executable, "-c", RAISE], preexec_fn=lower, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "1000", "1000"]


@pytest.mark.parametrize(
    ("limits", "reachable", "raised"),
    [
        ((1024, 1_000_000_000), ENOUGH, (ENOUGH, 1_000_000_000)),
        ((1024, resource.RLIM_INFINITY), ENOUGH, (ENOUGH, resource.RLIM_INFINITY)),
        ((1_000_000, 1_000_000_000), 1_000_000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), ENOUGH, None),
    ],
)
def test_a_huge_hard_limit_is_not_used_up_and_none_is_lowered(monkeypatch, limits, reachable, raised):
    from engine.run import disk

    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, value: given.append(value))
    assert disk.reachable_limit() == reachable
    disk.raise_limit()
    assert given == ([raised] if raised else [])
