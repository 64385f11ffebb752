"""Requests to the engine of an instance, without its server."""

import pytest
import torch

from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.embedded.rollout_model import RolloutModel, bfloat16_available
from engine.instance.protocol import Sampling

BF16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(not bfloat16_available(), reason="this processor has no bf16 products")
)
PROMPT = (5, 9, 20, 33, 7)


def engine_of(folder, slots=4, max_context=48, deterministic=False, dtype=torch.float32, conversations=False):
    return Engine(
        model=RolloutModel(folder, max_context, dtype),
        slots=slots,
        max_context=max_context,
        deterministic=deterministic,
        conversations=conversations,
    )


class Sent:
    """Requests sent to an engine, and their results."""

    def __init__(self, engine):
        self.engine = engine
        self.requests = []
        self.results = {}

    def send(self, prompt=PROMPT, **settings):
        number = len(self.requests)
        settings = {"max_tokens": 8, "seed": number} | settings
        request = SamplingRequest(
            tuple(prompt), Sampling(**settings), lambda result: self.results.update({number: result})
        )
        self.engine.submit(request)
        self.requests.append(request)
        return request

    def finish(self):
        while self.engine.busy:
            self.engine.step()
        return [self.results[number] for number in range(len(self.requests))]
