"""Launchers around instances that are named tensors (weights_double)."""

import pytest
from weights_double import PROBE, Client, Launcher, base_folder


@pytest.fixture
def base(tmp_path):
    return base_folder(tmp_path / "base")


@pytest.fixture
def start(base):
    """Start a launcher with instances called a, b, …; `faults` by name."""
    started = []

    def begin(count=2, staged=False, fixed=PROBE, in_turn=False, **faults):
        clients = [Client(name, base, faults.get(name)) for name in "abc"[:count]]
        started.append(Launcher(clients, staged, fixed, in_turn))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.close()
