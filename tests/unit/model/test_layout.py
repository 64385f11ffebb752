import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.layout import layout, split


def test_the_papers_example():
    row = layout([([1, 2, 3], [[4, 5], [6]])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]  # eq. 10
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3]  # eq. 11: responses continue after the prompt
    assert row.targets.tolist() == [4, 5, 6]
    assert row.scored.tolist() == [2, 3, 2]  # a response's first token is scored by the prompt's last
    visible = [[c == "1" for c in line] for line in ("100000", "110000", "111000", "111100", "111110", "111001")]
    assert row.mask.tolist() == visible  # Figure 2


def test_without_sharing_every_response_has_its_own_prompt():
    row = layout([([1, 2], [[4, 5], [6]])], shared_prompt=False)
    assert row.token_ids.tolist() == [1, 2, 4, 5, 1, 2, 6]
    assert row.lengths == (2, 1)
    assert not row.mask[4:, :4].any()


def test_an_empty_response_scores_nothing_and_counts():
    row = layout([([1, 2], [[], [3]])])
    assert row.lengths == (0, 1)
    assert row.targets.tolist() == [3]


groups = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=6),
        st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=3,
)


@given(groups, st.booleans())
def test_each_target_is_the_token_after_its_scored_position(groups, shared):
    row = layout(groups, shared)
    assert sum(row.lengths) == row.targets.numel() == row.scored.numel()
    flat = [token for _, responses in groups for response in responses for token in response]
    assert row.targets.tolist() == flat
    seen = row.mask.sum(1)
    assert torch.equal(seen, row.positions + 1)  # every token sees exactly the tokens before it in its own sequence


@given(st.integers(1, 50), st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(10, 200), st.booleans())
def test_split_keeps_order_and_budget(prompt, lengths, budget, shared):
    parts = split(prompt, lengths, budget, shared)
    assert [index for part in parts for index in part] == list(range(len(lengths)))
    for part in parts:
        cost = sum(lengths[i] for i in part) + prompt * (1 if shared else len(part))
        assert cost <= budget or len(part) == 1
