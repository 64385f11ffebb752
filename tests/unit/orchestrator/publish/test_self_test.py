"""How often the self-test of an instance loads the base model, and what it sees and leaves."""

import pytest

from engine.errors import WeightSyncError
from support.weights_double import base_folder, starting

UPDATE = "/update_weights"


@pytest.fixture
def start(tmp_path):
    yield from starting(base_folder(tmp_path / "base"))


async def begin(client):
    """As an orchestrator that ends in the middle of a weight update."""
    await client.begin_weight_update({})


async def take_perturbed(client):
    """As an orchestrator that ends between a self-test and the first version."""
    await begin(client)
    await client.update_weights({"update_info": {"transport": "base", "perturb": [1]}})
    await client.finish_weight_update({"weight_version": 2**40, "probe": [1, 2]})


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("before", "loads"),
    [(None, 1), (lambda client: client.pause({}), 1), (begin, 2), (take_perturbed, 2)],
)
def test_the_self_test_loads_the_base_again_only_if_the_instance_has_something_else(start, before, loads, stale):
    orchestrator = start(1)
    (one,) = orchestrator.pool.instances
    if before is not None:
        orchestrator.run(before(one.client))
    one.client.stale_head = stale
    if stale:
        with pytest.raises(WeightSyncError, match=r"a: self-test failed: .* moved by 0"):
            orchestrator.run(orchestrator.pool.check(one))
    else:
        orchestrator.run(orchestrator.pool.check(one))
    assert one.client.calls.count(UPDATE) == loads
    assert one.client.paused  # nobody is served by the perturbed weights
