"""The check of a vLLM instance's log-probabilities: each other quantity is refused by its name. On real vLLM:
tests/vllm/test_sampled_logprobs.py."""

import math
import random

import pytest
import torch

from engine.errors import BadInput
from engine.instance.vllm.logprob_check import check_logprobs

VOCABULARY = 300


class Engine:
    """A model whose logits are drawn from the prompt, with a spread as a model of language has it. `noise`: of bf16."""

    def __init__(self, report, noise=0.0, spread=3.0):
        self.report = report
        self.noise = noise
        self.spread = spread
        self.draws = random.Random(0)

    def __call__(self, method, path, body):
        assert (method, path) == ("POST", "/v1/completions")
        prompt = list(body["prompt"])
        scores = [self.logits(prompt[:at]).log_softmax(-1)[prompt[at]].item() for at in range(1, len(prompt))]
        tokens, logprobs = [], []
        for place in range(body["max_tokens"]):
            logits = self.logits(prompt + tokens)
            scaled = logits / body.get("temperature", 1.0)
            kept = scaled if body.get("top_p", 1.0) == 1 else scaled.masked_fill(scaled < scaled.max(), -math.inf)
            generator = torch.Generator().manual_seed(body.get("seed", 0) + place)
            tokens.append(torch.multinomial(kept.softmax(-1), 1, generator=generator).item())
            logprobs.append(self.report(logits, scaled, kept).log_softmax(-1)[tokens[-1]].item())
        entries = [None, *({str(one): {"logprob": score}} for one, score in zip(prompt[1:], scores, strict=True))]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, "prompt_logprobs": entries}
        return {"choices": [choice]}

    def logits(self, tokens):
        draw = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**32)
        noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(self.draws.getrandbits(30)))
        return torch.randn(VOCABULARY, generator=draw) * self.spread + noise * self.noise


@pytest.mark.parametrize(("noise", "spread"), [(0.0, 3.0), (0.05, 3.0), (0.0, 0.0), (0.0, 8.0)])
def test_log_probabilities_after_the_temperature_and_before_top_p_pass(noise, spread):
    check_logprobs(Engine(lambda logits, scaled, kept: scaled, noise, spread), "this engine")


class Tied(Engine):
    """The log-probabilities of some prompts differ between two batches. `off`: by how much, by the prompt's number."""

    def __init__(self, off):
        super().__init__(lambda logits, scaled, kept: scaled)
        self.off = off
        self.asked = 0

    def __call__(self, method, path, body):
        reply = super().__call__(method, path, body)
        if "prompt_logprobs" in body:
            self.asked += 1
            (choice,) = reply["choices"]
            choice["prompt_logprobs"][-1][str(body["prompt"][-1])]["logprob"] += self.off.get(self.asked, 0.0)
        return reply


@pytest.mark.parametrize("position", range(3))
def test_one_drawn_token_for_which_a_router_chose_other_experts_is_no_other_quantity(position):
    engine = Tied({5 * position + 3: -3.0})
    check_logprobs(engine, "this engine")
    assert engine.asked == 15


@pytest.mark.parametrize("off", [{1: -3.0}, {3: -3.0, 4: -3.0}, {3: -3.0, 4: 3.0}])
def test_the_most_likely_token_and_most_drawn_ones_must_agree(off):
    with pytest.raises(BadInput, match="this engine reports"):
        check_logprobs(Tied(off), "this engine")


OTHERS = {
    "before the temperature (raw_logprobs)": lambda logits, scaled, kept: logits,
    "after top_p (processed_logprobs)": lambda logits, scaled, kept: kept,
    "an unknown quantity": lambda logits, scaled, kept: scaled * 1.7,
    "reports an unknown": lambda logits, scaled, kept: scaled * math.nan,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_another_quantity_is_refused_by_its_name(name, noise):
    with pytest.raises(BadInput) as refused:
        check_logprobs(Engine(OTHERS[name], noise), "vLLM 9.9 on npu")
    assert str(refused.value).startswith("vLLM 9.9 on npu reports ")
    assert name in str(refused.value)


def test_only_the_tokens_that_follow_the_first_may_be_wrong():
    """As with a draft model, whose tokens another sampler accepts."""

    def first_token_right(logits, scaled, kept):
        turns.append(kept)
        return scaled if len(turns) == 1 else kept

    turns = []
    with pytest.raises(BadInput, match=r"after top_p .* after \[0, \d+\] at temperature"):
        check_logprobs(Engine(first_token_right), "this engine")
