"""Requests to the engine of an instance, without its server."""

from engine.instance.embedded.engine import Engine, SamplingRequest
from engine.instance.embedded.rollout_model import RolloutModel
from engine.instance.embedded.sampling import Sampling

PROMPT = (5, 9, 20, 33, 7)


def engine_of(folder, slots=4, max_context=48, deterministic=False):
    return Engine(RolloutModel(folder, max_context), slots, max_context, deterministic)


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
