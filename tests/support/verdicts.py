"""The verdict of the built-in reward on a response."""

from engine.reward.verifiers import math
from engine.types import Prompt, Response


def score(answer, text):
    """1 or 0: whether `math` takes the text for the answer."""
    response = Response(
        token_ids=(), logprobs=(), versions=(), loss_mask=(), finish_reason="stop", text=text, seed=0, instance=""
    )
    return math(Prompt("id", "", answer, ()), response).value
