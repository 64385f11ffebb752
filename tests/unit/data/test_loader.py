import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.loader import PromptLoader, sampling_seed
from engine.types import Prompt

seeds = st.integers(0, 2**63)
sizes = st.integers(1, 17)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"{i:016x}", str(i), "", ()) for i in range(count)]


def ids(loader: PromptLoader, steps: int) -> list[str]:
    return [prompt.id for step in range(steps) for prompt in loader.batch(step)]


@given(seed=seeds, count=sizes, batch=sizes, epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation_whatever_the_batch_size(seed, count, batch, epochs):
    steps = -(-count * epochs // batch)
    stream = ids(PromptLoader(prompts(count), seed, batch), steps)
    for epoch in range(epochs):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == [prompt.id for prompt in prompts(count)]


@given(seed=seeds, count=sizes, one=sizes, other=sizes)
def test_batches_are_cut_from_one_stream(seed, count, one, other):
    length = 3 * count
    streams = [ids(PromptLoader(prompts(count), seed, size), -(-length // size))[:length] for size in (one, other)]
    assert streams[0] == streams[1]


@given(seed=seeds, count=sizes, batch=sizes, step=st.integers(0, 1000))
def test_a_batch_needs_no_history(seed, count, batch, step):
    used = PromptLoader(prompts(count), seed, batch)
    for earlier in range(min(step, 5)):
        used.batch(earlier)
    assert used.batch(step) == PromptLoader(prompts(count), seed, batch).batch(step)
    assert len(used.batch(step)) == batch


@given(count=sizes, batch=sizes, steps=st.integers(1, 8))
def test_epoch_of_counts_how_often_the_set_was_used_up(count, batch, steps):
    loader = PromptLoader(prompts(count), 0, batch)
    epochs = [loader.epoch_of(step, index) for step in range(steps) for index in range(batch)]
    assert epochs == list(itertools.islice((e for e in itertools.count() for _ in range(count)), steps * batch))


def test_order_differs_between_epochs_and_seeds():
    first = ids(PromptLoader(prompts(50), 0, 50), 2)
    assert first[:50] != first[50:]
    assert first[:50] != ids(PromptLoader(prompts(50), 1, 50), 1)


def test_order_and_seeds_are_pinned():
    # A checkpoint resumes with these numbers: they may not depend on the machine or the version of Python.
    assert [p.problem for p in PromptLoader(prompts(6), 7, 6).batch(0)] == list("204351")
    # The first 8 bytes of SHA-256 of "response\\0007\\0001\\00000ff\\0003" (printf and sha256sum), halved.
    assert sampling_seed(7, 1, "00ff", 3) == 0xA9245B221A7C849


def test_sampling_seeds_are_distinct_and_63_bits():
    grid = itertools.product((0, 1), range(3), ("0" * 16, "1" * 16), range(32))
    made = [sampling_seed(*key) for key in grid]
    assert len(set(made)) == len(made)
    assert all(0 <= seed < 2**63 for seed in made)
    assert max(made) >= 2**62


def test_a_loader_without_prompts_is_refused():
    with pytest.raises(ValueError, match="not 0 and 4"):
        PromptLoader([], 0, 4)


def test_the_fingerprint_is_of_the_prompts_and_their_order():
    fingerprints = {PromptLoader(chosen, 0, 2).fingerprint for chosen in (prompts(4), prompts(4)[::-1], prompts(3))}
    assert len(fingerprints) == 3
    assert PromptLoader(prompts(4), 7, 3).fingerprint in fingerprints


@pytest.mark.parametrize(
    "tokens",
    [((1, 2), (4,)), ((1,), (2, 3)), ((), (1, 2, 3)), ((1, 2, 3), ()), ((1, 3), (2,)), ((1, 2), (3 + 2**16,))],
)
def test_the_fingerprint_is_of_the_prompts_tokens(tokens):
    """The same problems, whose template, clock or tokenizer is another."""

    def fingerprint(*tokens):
        made = [Prompt(f"{number}", "", "", ids) for number, ids in enumerate(tokens)]
        return PromptLoader(made, 0, 2).fingerprint

    assert fingerprint(*tokens) != fingerprint((1, 2), (3,)) == fingerprint([1, 2], (3,))


def test_the_fingerprint_is_of_the_columns_that_a_reward_reads():
    def fingerprint(columns):
        return PromptLoader([Prompt("id", "", "", (1,), columns)], 0, 1).fingerprint

    found = [fingerprint(columns) for columns in ({}, {"a": 1, "b": 2}, {"a": 1, "b": "2"}, {"b": 2, "a": 1})]
    assert (len(set(found)), found[1]) == (3, found[3])


def test_the_fingerprint_tells_a_prompts_tokens_from_the_next_prompt():
    name = int.from_bytes(b"abc\0", "little")
    two = [Prompt("x", "", "", (1,)), Prompt("abc", "", "", (2,))]
    assert PromptLoader(two, 0, 2).fingerprint != PromptLoader([Prompt("x", "", "", (1, name, 2))], 0, 2).fingerprint


@given(
    seed=seeds,
    parts=st.lists(st.tuples(sizes, st.floats(0.1, 10)), min_size=2, max_size=3),
    batch=sizes,
    step=st.integers(0, 30),
)
def test_a_mixture_has_each_set_in_proportion_and_each_of_its_prompts_equally_often(seed, parts, batch, step):
    count = sum(size for size, _ in parts)
    loader = PromptLoader(prompts(count), seed, batch, parts)
    wanted = [max(1, round(count * weight / sum(one for _, one in parts))) for _, weight in parts]
    length = sum(wanted)
    stream = [loader.at(place) for place in range(3 * length)]
    numbers = [int(prompt.problem) for _, prompt in stream]
    first = 0
    for (size, _), used in zip(parts, wanted, strict=True):
        for epoch in range(3):
            of_epoch = numbers[epoch * length : (epoch + 1) * length]
            assert sum(first <= number < first + size for number in of_epoch) == used
        times = [numbers.count(number) for number in range(first, first + size)]
        assert max(times) - min(times) <= 1
        first += size
    assert len({(epoch, prompt.id) for epoch, prompt in stream}) == len(stream)  # each has seeds of its own
    assert loader.batch(step) == PromptLoader(prompts(count), seed, batch, parts).batch(step)
    assert [loader.epoch_of(step, index) for index in range(batch)] == [
        loader.at(step * batch + index)[0] for index in range(batch)
    ]


def test_one_set_with_a_weight_is_in_the_order_of_one_without():
    assert ids(PromptLoader(prompts(6), 7, 6, [(6, 2.5)]), 3) == ids(PromptLoader(prompts(6), 7, 6), 3)
    mixed = {PromptLoader(prompts(6), 7, 6, [(3, weight), (3, 1)]).fingerprint for weight in (1, 2)}
    assert len({*mixed, PromptLoader(prompts(6), 7, 6).fingerprint}) == 3
