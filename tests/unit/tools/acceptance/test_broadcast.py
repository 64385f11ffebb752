"""Bare broadcasts between real ranks over gloo."""

import pytest

from engine.errors import ProcessDied
from engine.tools.acceptance.broadcast import broadcasting


def test_buckets_are_moved_again_and_again_and_a_dead_rank_is_named(tmp_path):
    with broadcasting(machine="cpu", sizes=[100_000, 7], receivers=1, logs=tmp_path, timeout_s=60) as pair:
        assert len(pair.ranks) == 2
        assert all(0 < pair.again() < 60 for _ in range(3))
        pair.ranks[1].stop(0.0)
        with pytest.raises(ProcessDied, match="broadcast rank [01] (was ended by SIG|exited with 1)"):
            pair.again()
    assert not any(rank.alive for rank in pair.ranks)
