"""What a stage tells an orchestrator that is gone."""

import socket
from contextlib import nullcontext

import pytest

from engine.client.connection import Connection
from engine.errors import MetronomeError
from engine.trainer.ranks.rank_process import run_rank


@pytest.fixture
def gone():
    """A connection to an orchestrator that listens no more."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connection = Connection(f"http://127.0.0.1:{port}", None, "trainer-0", 5.0)
    yield connection
    connection.close()


def test_a_rank_whose_orchestrator_is_gone_ends_with_its_own_error_and_no_traceback(gone, tmp_path, capfd):
    def work():
        raise MetronomeError("the weights could not be sent")

    assert run_rank(folder=tmp_path, plane=gone, stage="train", session=nullcontext, work=work) == 1
    said = capfd.readouterr().err
    assert said.startswith("trainer-0 ends: the weights could not be sent (the orchestrator was not told: ")
    assert "can't be reached" in said
