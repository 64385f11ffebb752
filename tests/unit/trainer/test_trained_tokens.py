"""Every advantage and every loss of drawn batches, with tools, truncation and exclusion, is that of a plain loop in
fp64 over the trained tokens."""

import math
import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.advantages import ADVANTAGES
from engine.algorithm.batch_statistics import BatchTokens
from engine.algorithm.losses import LOSSES, Terms
from engine.config import Algorithm
from engine.trainer.micro_batches import micro_batches
from engine.trainer.ranks.packing import Packing
from engine.types import Group, Prompt, Score
from engine.wire.columns import batch_scores, open_group, pack_group
from support.policies import advantages_with, response

BUILT_IN = tuple(LOSSES)
"""Before another test registers a loss of its own."""
LOW = 0.2
HIGH = 0.28
BETA = 0.3
SECOND_MOMENT = 0.0437
LONGEST = 8
BUFFER = 4


@st.composite
def drawn_responses(draw):
    """A response of turns that were sampled (true) and of a tool (false), cut or not."""
    mask = draw(st.lists(st.booleans(), min_size=1, max_size=LONGEST))
    return replace(response([7] * len(mask), mask=mask), finish_reason=draw(st.sampled_from(["stop", "length"])))


@st.composite
def batches(draw):
    size = draw(st.integers(2, 4))
    groups = []
    for index in range(draw(st.integers(1, 3))):
        scores = [Score(draw(st.integers(-4, 4)) / 4, excluded=draw(st.integers(0, 4)) == 0) for _ in range(size)]
        responses = tuple(draw(drawn_responses()) for _ in range(size))
        groups.append(Group(0, index, Prompt(f"p{index}", "", "", (1, 2)), responses, tuple(scores)))
    return groups


SETTINGS = st.fixed_dictionaries(
    {"mask_truncated": st.booleans(), "overlong_buffer": st.sampled_from([0, BUFFER]), "longest": st.just(LONGEST)}
)


def trained(group, number, mask_truncated):
    """Whether each token of the response is trained, by the words of docs/algorithms.md."""
    one = group.responses[number]
    out = group.scores[number].excluded or (mask_truncated and one.finish_reason == "length")
    return [bool(sampled) and not out for sampled in one.loss_mask]


def shaped(group, number, buffer):
    """The reward less the overlong penalty, which counts all tokens."""
    over = len(group.responses[number].token_ids) - (LONGEST - BUFFER)
    return group.scores[number].value - (min(max(over / BUFFER, 0), 1) if buffer else 0)


def plain_advantages(name, groups, given):
    """{(group, number): advantage} of the responses that are not excluded."""
    rewards = {}
    lengths = {}
    for group in groups:
        for number, score in enumerate(group.scores):
            if not score.excluded:
                rewards[group.index, number] = shaped(group, number, given["overlong_buffer"])
                lengths[group.index, number] = sum(trained(group, number, given["mask_truncated"]))
    found = {}
    for group in groups:
        keys = [key for key in rewards if key[0] == group.index]
        values = [rewards[key] for key in keys]
        if not keys or (len(keys) < 2 and name != "reinforce_plus_plus"):
            found |= dict.fromkeys(keys, 0.0)
            if name == "reinforce_plus_plus_baseline":
                rewards |= dict.fromkeys(keys, 0.0)
            continue
        mean = fmean(values)
        deviation = stdev(values) if len(values) > 1 else 0.0
        best, second = sorted([*values, -math.inf])[:-3:-1]
        tokens = sum(lengths[key] for key in keys)
        weighted = sum(lengths[key] * rewards[key] for key in keys) / max(1, tokens)
        for key in keys:
            reward = rewards[key]
            found[key] = {
                "grpo": (reward - mean) / (deviation + 1e-6),
                "dr_grpo": reward - mean,
                "gpg": reward - mean,
                "rloo": (reward - mean) * len(keys) / max(1, len(keys) - 1),
                "opo": reward - weighted if tokens else 0.0,
                "grpo_passk": (best - second) / (deviation + 1e-6) if reward == best else 0.0,
                "reinforce_plus_plus": reward,
                "reinforce_plus_plus_baseline": reward - mean,
            }[name]
    if ADVANTAGES[name].scope == "batch":
        tokens = [found[key] for key in found for _ in range(lengths[key])]
        if len(tokens) < 2 or min(tokens) == max(tokens):
            return dict.fromkeys(found, 0.0)
        found = {key: (value - fmean(tokens)) / math.sqrt(stdev(tokens) ** 2 + 1e-8) for key, value in found.items()}
    return found


@given(groups=batches(), given_=SETTINGS)
def test_advantages(groups, given_):
    rows = [pack_group(group, given_["mask_truncated"]) for group in groups]
    for name in ADVANTAGES:
        batch = batch_scores(rows) if ADVANTAGES[name].scope == "batch" else None
        found = plain_advantages(name, groups, given_)
        for group, row in zip(groups, rows, strict=True):
            ours = advantages_with(advantage=name, **given_).advantages(open_group(row, batch)).tolist()
            plain = [found.get((group.index, number), 0.0) for number in range(len(ours))]
            assert ours == pytest.approx(plain, rel=1e-5, abs=1e-5), name


def test_an_advantage_of_a_users_own_gets_the_trained_lengths(tmp_path):
    (tmp_path / "own.py").write_text("def own(rewards, lengths): return lengths")
    responses = (response([7] * 5, mask=[True, False, False, True, True]), response([7] * 4), response([7] * 2))
    cut = replace(responses[1], finish_reason="length")
    scores = (Score(1.0), Score(0.0), Score(0.0, excluded=True))
    group = Group(0, 0, Prompt("p", "", "", (1,)), (responses[0], cut, responses[2]), scores)
    spec = f"{tmp_path / 'own.py'}:own"
    assert advantages_with(advantage=spec).advantages(group).tolist() == [3.0, 4.0, 0.0]
    assert advantages_with(advantage=spec, mask_truncated=True).advantages(group).tolist() == [3.0, 0.0, 0.0]


def clipped(ratio, advantage, low=1 - LOW, high=1 + HIGH):
    return min(ratio * advantage, min(max(ratio, low), high) * advantage)


def moment_limit(tokens):
    """M2PO: the (log r)² from which outward tokens are masked."""
    moments = sorted(log * log for log, advantage, _ in tokens if log * advantage > 0)
    kept = [count for count in range(1, len(moments) + 1) if fmean(moments[:count]) <= SECOND_MOMENT]
    return math.inf if len(kept) == len(moments) else moments[len(kept)]


def balanced(tokens):
    """BAPO: the bounds at which tokens with A > 0 contribute half of the surrogate."""

    def share(low, high):
        gains = [a * (min(math.exp(log), high) if a > 0 else max(math.exp(log), low)) for log, a, _ in tokens]
        whole = sum(map(abs, gains))
        return sum(gain for gain in gains if gain > 0) / whole if whole else 1.0

    low, high = 0.6, 1.2
    while share(low, high) < 0.5 - 1e-6 and (high < 3.0 or low < 0.9):
        high, low = (min(high + 0.05, 3.0), low) if high < 3.0 else (high, min(low + 0.05, 0.9))
    return low, high


def plain_loss(name, responses, longest):
    """The step's loss and largest ratio. `responses`: for each the (log ratio, advantage, log-probability) of its
    trained tokens; the reference's log-probability is 0.1 above."""
    everything = [token for tokens in responses for token in tokens]
    limit = moment_limit(everything)
    low, high = balanced(everything)
    sums = []
    ratios = [0.0]
    for tokens in responses:
        mean = fmean([log for log, _, _ in tokens] or [0.0])
        total = 0.0
        for log, advantage, logprob in tokens:
            ratio = math.exp(mean if name == "gspo" else log)
            ratios.append(ratio)
            if name in ("grpo", "dapo", "dr_grpo", "gspo"):
                gain = clipped(ratio, advantage)
            elif name == "cispo":
                gain = min(max(ratio, 1 - LOW), 1 + HIGH) * advantage * logprob
            elif name == "gpg":
                gain = advantage * logprob
            elif name == "m2po":
                gain = 0.0 if log * advantage > 0 and log * log >= limit else ratio * advantage
            else:
                gain = clipped(ratio, advantage, low, high)
            total += gain - BETA * (math.exp(0.1) - 0.1 - 1)
        sums.append(total / max(1, len(tokens)) if LOSSES[name].aggregation == "response" else total)
    by = {"response": len(responses), "token": max(1, len(everything)), "constant": len(responses) * longest}
    return -sum(sums) / by[LOSSES[name].aggregation], max(ratios)


@given(groups=batches(), given_=SETTINGS, seed=st.integers(0, 1000))
def test_losses(groups, given_, seed):
    for name in BUILT_IN:
        compare_loss(name, groups, given_, random.Random(seed))


def compare_loss(name, groups, given_, draw):
    made = advantages_with(loss=name, advantage="dr_grpo", **given_)
    loss = LOSSES[name]
    coefficients = Algorithm(clip_low=LOW, clip_high=HIGH, kl_coef=BETA, m2po={"threshold": SECOND_MOMENT})
    plain = []
    parts = []
    (packed,) = micro_batches(groups, Packing(10_000), made)
    place = 0
    for group, number in packed.members:
        own = []
        for is_trained in trained(group, number, given_["mask_truncated"]):
            # what is not trained may be anything
            log = draw.uniform(-0.9, 0.9) if is_trained else draw.uniform(3, 5)
            parts.append((log, draw.uniform(-3, -0.5)))
            if is_trained:
                own.append((log, float(packed.advantages[place]), parts[-1][1]))
            place += 1
        plain.append(own)
    logs, logprobs = torch.tensor(parts, dtype=torch.float64).unbind(1)
    tokens = packed.weights > 0  # as engine.trainer.deferred_windows takes them
    chosen = BatchTokens(logs[tokens], packed.advantages[tokens])
    terms = Terms(
        logprobs=logprobs,
        old=logprobs - logs,
        reference=logprobs + 0.1,
        entropy=torch.ones_like(logs),
        advantages=packed.advantages.double(),
        weights=packed.weights.double(),
        rollout=logprobs,
        response=packed.response,
        responses=len(packed.members),
        statistics=loss.statistics(chosen, coefficients) if loss.statistics is not None else (),
    )
    found = loss(terms, coefficients)
    counts = [count for group in groups for count in made.count_tokens(group)]
    ours = float(found.total) / loss.denominator(len(counts), sum(counts), LONGEST)
    expected, ratio = plain_loss(name, plain, LONGEST)
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(found.ratio_max) == pytest.approx(ratio, rel=1e-5)
    weight = sum(count > 0 for count in counts) if loss.aggregation == "response" else sum(counts)
    assert float(found.entropy) / max(1, weight) == pytest.approx(float(any(counts)))  # all entropies are 1
