"""Every advantage against numbers by hand and NumPy written from the papers; what must hold for all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.algorithm.advantages import ADVANTAGES, advantage
from engine.algorithm.shaping import soft_overlong_penalty
from engine.config import BATCH_SCOPE

BY_HAND = {  # rewards 1, 0, 0, 1, lengths 2, 4, 6, 8
    "grpo": [0.5 / 3**-0.5, -(0.5 / 3**-0.5), -(0.5 / 3**-0.5), 0.5 / 3**-0.5],
    "dr_grpo": [0.5, -0.5, -0.5, 0.5],
    "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3],  # each against the mean of three others: 1 - 1/3, 0 - 2/3
    "opo": [0.5, -0.5, -0.5, 0.5],  # baseline (2 + 8) / 20
    "grpo_passk": [0.0, 0.0, 0.0, 0.0],  # a tie for the best
    "gpg": [0.5, -0.5, -0.5, 0.5],
}

REFERENCE = {
    "grpo": lambda r, n: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "dr_grpo": lambda r, n: r - r.mean(),
    "rloo": lambda r, n: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "opo": lambda r, n: r - np.average(r, weights=n),
    "grpo_passk": lambda r, n: (
        np.where(np.arange(len(r)) == r.argmax(), np.sort(r)[-1] - np.sort(r)[-2], 0) / (r.std(ddof=1) + 1e-6)
    ),
    "gpg": lambda r, n: r - r.mean(),
}

groups = st.integers(2, 12).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(-40, 40).map(lambda half: half / 2), min_size=size, max_size=size, unique=True),
        st.lists(st.integers(1, 500), min_size=size, max_size=size),
    )
)


def of(name, rewards, lengths):
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths, dtype=torch.float64))


def test_all_are_tested():
    assert {name for name, known in ADVANTAGES.items() if known.scope == "group"} == BY_HAND.keys() == REFERENCE.keys()
    assert {name for name, known in ADVANTAGES.items() if known.scope == "batch"} == set(BATCH_SCOPE)


@pytest.mark.parametrize(
    ("name", "rewards", "lengths", "expected"),
    [
        *((name, [1, 0, 0, 1], [2, 4, 6, 8], found) for name, found in BY_HAND.items()),
        ("opo", [1, 0], [9, 1], [0.1, -0.9]),  # the baseline is weighed by length
        ("opo", [1, 0], [0, 0], [0.0, 0.0]),
        ("grpo_passk", [0.2, 1.0, 0.5], [1, 1, 1], [0, 0.5 / np.std([0.2, 1, 0.5], ddof=1), 0]),  # only the best counts
        # of one and three tokens: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
        ("reinforce_plus_plus", [[1.0, 0.0]], [[1, 3]], [[1.5, -0.5]]),
        ("reinforce_plus_plus", [[1.0]], [[1]], [[0.0]]),
    ],
)
def test_by_hand(name, rewards, lengths, expected):
    np.testing.assert_allclose(of(name, rewards, lengths).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rewards", "expected"), [([1.0, 1.0 - 2e-6], 1e-6), ([1e-30, 0.0], 5e-31)])
def test_a_small_difference_counts_and_rounding_does_not(rewards, expected):
    assert of("dr_grpo", [1.0, 1.0 - 0.9e-6], [1, 1]).tolist() == [0.0, 0.0]
    assert of("dr_grpo", rewards, [1, 1]).tolist() == pytest.approx([expected, -expected])


@pytest.mark.parametrize("name", REFERENCE)
@given(group=groups)
def test_the_papers_formula(name, group):
    rewards, lengths = group
    expected = REFERENCE[name](np.array(rewards, dtype=np.float64), np.array(lengths, dtype=np.float64))
    np.testing.assert_allclose(of(name, rewards, lengths).numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", REFERENCE)
@given(group=groups, shift=st.integers(-100, 100), random=st.randoms())
def test_a_shift_changes_nothing_and_a_permutation_permutes(name, group, shift, random):
    rewards, lengths = group
    before = of(name, rewards, lengths)
    torch.testing.assert_close(of(name, [reward + shift for reward in rewards], lengths), before, rtol=1e-6, atol=1e-5)
    order = random.sample(range(len(rewards)), len(rewards))
    permuted = of(name, [rewards[i] for i in order], [lengths[i] for i in order])
    torch.testing.assert_close(permuted, before[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFERENCE)
@given(group=groups, scale=st.sampled_from([0.25, 3.0, 40.0]))
def test_a_scale_of_the_rewards_scales_what_is_not_divided_by_their_spread(name, group, scale):
    rewards, lengths = group
    before = of(name, rewards, lengths)
    after = of(name, [reward * scale for reward in rewards], lengths)
    factor = 1.0 if name in ("grpo", "grpo_passk") else scale
    # std + 1e-6 is not quite free of scale
    torch.testing.assert_close(after, before * factor, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", REFERENCE)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(name, value, size):
    assert of(name, [value] * size, list(range(1, size + 1))).tolist() == [0.0] * size


@pytest.mark.parametrize("name", REFERENCE)
@given(
    value=st.floats(2**-20, 2**20, width=32),
    steps=st.lists(st.integers(-4, 4), min_size=2, max_size=16),
    sign=st.sampled_from([1, -1]),
)
def test_rewards_that_differ_by_rounding_give_exactly_zero(name, value, steps, sign):
    base = torch.tensor(value * sign, dtype=torch.float32).view(torch.int32)
    rewards = (base + torch.tensor(steps, dtype=torch.int32)).view(torch.float32)
    assert ADVANTAGES[name](rewards, torch.ones(len(steps))).tolist() == [0.0] * len(steps)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
@given(rewards=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=64))
def test_the_sum_of_a_group_is_zero_to_rounding(name, rewards):
    found = ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float32), torch.ones(len(rewards))).double()
    assert abs(found.sum()) <= len(rewards) * (2**-23 * found.abs().max() + 2**-149)  # the least number of fp32


@pytest.mark.parametrize("name", BATCH_SCOPE)
@given(
    value=st.floats(-1e6, 1e6, width=32), seed=st.integers(0, 99), shape=st.sampled_from([(1, 2), (64, 8), (512, 16)])
)
def test_a_batch_of_equal_rewards_gives_exactly_zero(name, value, seed, shape):
    lengths = torch.randint(1, 16384, shape, generator=torch.Generator().manual_seed(seed)).float()
    assert not ADVANTAGES[name](torch.full(shape, value), lengths).any()


def test_a_batch_that_differs_by_rounding_gives_exactly_zero_whatever_has_no_token():
    rewards = torch.full((4, 8), 0.95)
    rewards[1, 3] = torch.nextafter(rewards[1, 3], torch.tensor(1.0))
    lengths = torch.arange(1.0, 33.0).reshape(4, 8)
    assert not ADVANTAGES["reinforce_plus_plus"](rewards, lengths).any()
    rewards[2, 5] = 0.0
    lengths[2, 5] = 0.0
    assert not ADVANTAGES["reinforce_plus_plus"](rewards, lengths).any()


@pytest.mark.parametrize("name", REFERENCE)
def test_a_group_of_one_is_refused(name):
    with pytest.raises(ValueError, match="at least 2"):
        of(name, [1.0], [3])


def test_a_users_advantage_is_checked():
    try:
        advantage("mine", least=1)(lambda rewards, lengths: rewards[:1])
        with pytest.raises(ValueError, match="one finite number per response"):
            of("mine", [1.0, 2.0], [1, 1])
        assert of("mine", [1.5], [1]).tolist() == [1.5]
    finally:
        del ADVANTAGES["mine"]


batches = st.tuples(st.integers(1, 5), st.integers(2, 6)).flatmap(
    lambda shape: st.tuples(
        *(
            st.lists(st.lists(values, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0])
            for values in (st.integers(-20, 20).map(lambda half: half / 2), st.integers(1, 30))
        )
    )
)


@pytest.mark.parametrize("name", BATCH_SCOPE)
@given(batch=batches)
def test_batch_statistics_are_over_every_token(name, batch):
    """Whitened as the papers write it: one entry per token, mean 0 and unbiased variance 1 over all of them."""
    rewards, lengths = (np.array(rows, dtype=np.float64) for rows in batch)
    values = rewards - rewards.mean(1, keepdims=True) if name.endswith("baseline") else rewards
    tokens = np.repeat(values.ravel(), lengths.astype(int).ravel())
    if len(tokens) < 2:
        return
    found = of(name, rewards, lengths).numpy()
    np.testing.assert_allclose(
        found, (values - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8), rtol=1e-6, atol=1e-6
    )
    if tokens.std() > 1e-3:
        spread = np.repeat(found.ravel(), lengths.astype(int).ravel())
        assert abs(spread.mean()) < 1e-6
        assert spread.var(ddof=1) == pytest.approx(1.0, abs=1e-3)


def test_overlong_shaping_by_hand():
    # limit 20, buffer 4: free up to 16, then a quarter a token
    lengths = torch.tensor([0.0, 16, 17, 19, 20, 25])
    assert soft_overlong_penalty(lengths, 20, 4).tolist() == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
