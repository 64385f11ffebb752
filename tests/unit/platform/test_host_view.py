"""Megatron's modules believe in CUDA; everything else sees the real torch."""

import inspect
import re

import pytest
import torch

from engine.platform import get_platform


@pytest.fixture(scope="module", autouse=True)
def adapted():
    get_platform("cpu").adapt_megatron()


def test_only_megatron_sees_the_view():
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async, fully_parallel
    from megatron.core.optimizer import distrib_optimizer

    views = {module.torch for module in (parallel_state, filesystem_async, fully_parallel, distrib_optimizer)}
    assert len(views) == 1
    (view,) = views
    assert view is not torch
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.zeros(2, device="cuda").device.type == "cpu"
    assert view.empty_like(torch.ones(1), device="cuda:0").device.type == "cpu"
    assert view.nn is torch.nn
    assert "cpu" not in str(torch.cuda.current_device)


def test_tensors_that_megatron_moves_to_cuda_stay():
    """`tensor.cuda()` and type names in the code of the optimizer, of tied embeddings and of loaded checkpoints."""
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for function in (
        LanguageModule.setup_embeddings_and_output_layer,
        exchange_utils.exchange_loaded_tensors_gather_object,
        DistributedOptimizer._build_model_and_main_param_groups,
    ):
        code = inspect.unwrap(function).__code__
        assert "cuda" not in code.co_names
        assert not re.search(r"'torch\.cuda\.\w+Tensor'", repr(code.co_consts[1:]))


def test_streams_and_events():
    from megatron.core import parallel_state

    cuda = parallel_state.torch.cuda
    stream = cuda.Stream(device=cuda.current_device())
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        assert cuda.current_stream() is stream
    event = stream.record_event()
    event.synchronize()
    assert event.query()


def test_nothing_is_queued_for_a_start_of_cuda():
    """Megatron's own way to set a random state leaves a callback behind each time when CUDA does not run."""
    from megatron.core.tensor_parallel import random

    before = len(torch.cuda._queued_calls)
    state = random._get_cuda_rng_state()
    torch.rand(1)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(torch.cuda._queued_calls) == before
