"""The Megatron trainer as a service drives it; a whole run of it is in tests/integration/test_service_examples.py."""

import pytest

from engine import platform
from engine.errors import BadInput
from engine.trainer.service_adapter import MegatronAdapter
from support.policies import a_group
from support.runs import config_of

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_an_update_tells_its_figures_and_kl_only_with_a_reference(settings, coefficient):
    adapter = MegatronAdapter(config_of(settings | {"algorithm.kl_coef": coefficient}), platform.get("cpu"))
    adapter.accumulate([a_group(seed=1)])
    figures = adapter.update(4)
    assert ("kl" in figures) == (coefficient > 0)
    assert figures.keys() - {"kl"} == {"loss", "grad_norm", "learning_rate"}
    assert figures["grad_norm"] > 0


def test_several_updates_a_step_are_refused(settings):
    config = config_of(settings | {"train.updates": 2, "algorithm.old_policy": "behavior"})
    with pytest.raises(BadInput, match="train.updates = 2: a trainer behind the service makes one a step"):
        MegatronAdapter(config, platform.get("cpu"))
