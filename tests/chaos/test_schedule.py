"""The schedule is a function of its seed, has every kind of fault, and keeps to its times."""

from collections import Counter

import pytest

from chaos.schedule import CONDITIONAL, GAP_S, KINDS, LINKS, LONGEST_S, ROLES, VERIFIER_S, schedule

SEEDS = range(20)


def test_a_seed_says_all():
    assert schedule(7, 10.0) == schedule(7, 10.0)
    assert schedule(7, 10.0) != schedule(8, 10.0)


def test_every_fault_of_the_list_is_there():
    assert {target for kind, target in KINDS if kind == "kill"} == set(ROLES)
    assert {target for kind, target in KINDS if kind == "stop"} == set(ROLES)
    assert {"orchestrator", "rank", "agent", "instance", "verifier", "flow", "worker"} < set(ROLES)
    assert {target for kind, target in KINDS if kind == "link"} == {*LINKS, "down"}
    assert {target for kind, target in KINDS if kind == "restart"} == {"prefect", "mlflow", "s3"}
    assert {target for kind, target in KINDS if kind == "flip a byte"} == {"checkpoint", "bucket", "reply"}


def test_each_comes_once_before_one_comes_again():
    found = Counter((fault.kind, fault.target) for fault in schedule(3, 60.0))
    assert set(found) == set(KINDS)
    assert max(found.values()) - min(found.values()) <= 1


@pytest.mark.parametrize("minutes", [1.0, 4.0, 10.0, 60.0])
def test_gaps_and_lengths(minutes):
    scale = min(1.0, max(1 / 3, minutes / 10))
    for seed in SEEDS:
        faults = schedule(seed, minutes)
        times = [0.0, *(fault.at_s for fault in faults)]
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert all(GAP_S[0] * scale - 0.11 <= gap <= GAP_S[1] * scale + 0.11 for gap in gaps)
        assert times[-1] < 60 * minutes
        for fault in faults:
            assert fault.for_s <= LONGEST_S * scale
            assert bool(fault.for_s) == (fault.kind in ("stop", "link", "no space", "restart"))
            assert 0 <= fault.choice < 1
            if (fault.kind, fault.target) == ("stop", "verifier"):
                assert fault.for_s <= VERIFIER_S


def test_what_the_machine_does_not_permit_is_left_out_and_nothing_else_moves():
    everything = schedule(5, 60.0)
    for permitted in (frozenset(), frozenset({"no space"}), frozenset({"down"})):
        left_out = CONDITIONAL - permitted
        kept = [fault for fault in everything if not {fault.kind, fault.target} & left_out]
        assert schedule(5, 60.0, permitted) == kept
        assert len(kept) < len(everything)
