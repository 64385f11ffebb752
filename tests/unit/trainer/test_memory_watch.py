"""What a trainer rank says that has run out of device memory, by what it held."""

import pytest
import torch

from engine.errors import DeviceMemoryError
from engine.model.shape import read_shape
from engine.platform.cpu import Cpu
from engine.run.memory import trainer_need
from engine.trainer.rank import MemoryWatch
from support.runs import config_of

MIB = 2**20
SAID = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 79.11 GiB."


class Device(Cpu):
    """A device that holds as much as a test says."""

    held = 0
    peak = 0

    def held_bytes(self):
        return self.held

    def peak_bytes(self):
        return self.peak

    def memory_summary(self):
        return "| a table |"


@pytest.fixture
def said(settings, tmp_path, request):
    """The error of a step, by what was held when it began and what at most, beside the dry run's sum, in bytes."""
    config = config_of(settings | getattr(request, "param", {}))
    need = trainer_need(read_shape(config.folder.parent / config.model.path), config)
    states, working = (sum(term.bytes for term in need.part(states=part)) for part in (True, False))
    device = Device()
    watch = MemoryWatch(config, device, "trainer-3", tmp_path / "logs")

    def error(held=0, more=0, step=7):
        device.held = int(states + held)
        if step is not None:
            watch.begin_step(step)
        device.held = device.peak = int(states + working + more)
        with pytest.raises(DeviceMemoryError) as found, watch.named_errors():
            raise torch.OutOfMemoryError(SAID)
        return str(found.value)

    return error


def test_the_states_are_too_large(said, tmp_path):
    found = said(held=MIB)
    assert "\n" not in found
    assert found.startswith("trainer-3 ran out of memory in step 7: ")
    assert "were held at the start of the step, where the dry run counts weights 0." in found
    assert "parallel.tensor (now 1)" in found
    assert "train.micro_batch_tokens" not in found
    assert "train.recompute" not in found
    assert f"torch says: {SAID}" in found
    assert (tmp_path / "logs/trainer-3-memory.txt").read_text() == f"{SAID}\n\n| a table |"


def test_the_work_of_a_step_is_too_large_with_what_torch_asked_for(said):
    found = said(more=-MIB)  # two MiB were asked for
    assert "for the work of a step it counts activations" in found
    assert "train.recompute (now false), train.micro_batch_tokens (now 4096)" in found
    assert 'of train.recompute try "selective" first' in found
    assert "train.distributed_optimizer" not in found


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ({"train.recompute": "selective"}, "try a number above a third of a stage's layers, and true last"),
        ({"train.recompute": 1}, "try a larger number of layers, and true last"),
        ({"train.recompute": True}, None),
    ],
    indirect=["said"],
)
def test_the_next_step_of_recomputation_is_the_softest(said, advice):
    found = said(more=MIB)
    assert advice in found if advice else "of train.recompute try" not in found


def test_the_device_has_less_than_was_counted_or_the_models_do_not_fit(said):
    assert "ran out of memory while it loaded its models: " in said(step=None)
    found = said(more=-3 * MIB)
    assert "no more than the dry run counts: the device has less, another process uses it" in found
    assert "train.recompute (now false)" in found
    assert "train.offload (now false)" in found
