"""Which models a rank holds, by the algorithm's settings."""

import pytest

from engine import platform
from support.runs import config_of

pytestmark = pytest.mark.usefixtures("megatron")


def models(settings, **changes):
    from engine.trainer.ranks.models import open_models

    return open_models(config_of(settings | changes), platform.get_platform("cpu"))


@pytest.mark.parametrize("old_policy", ["previous", "behavior", "rollout"])
@pytest.mark.parametrize(
    ("kl", "reference"), [({"algorithm.kl_coef": 0}, False), ({}, True), ({"stages.reference.tensor": 1}, False)]
)
def test_there_are_no_models_but_those_that_are_needed(settings, old_policy, kl, reference):
    """The third: a stage of its own computes the reference."""
    found = models(settings, **{"algorithm.old_policy": old_policy, **kl})
    assert (found.old is not None) == (old_policy == "previous")
    assert (found.reference is not None) == reference


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_copies_take_turns_in_one_model(settings, offload):
    found = models(settings, **{"train.offload": offload})
    assert (found.old.model() is found.reference.model()) == offload
    found.old.set([weight * 2 for weight in found.old.weights])
    doubled, base = ([weight.clone() for weight in copy.model().parameters()] for copy in (found.old, found.reference))
    for policy, twice, once in zip(found.policy.parameters(), doubled, base, strict=True):
        assert once.equal(policy)
        assert twice.equal(2 * policy)
