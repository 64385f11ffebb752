import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.kernels import cpu
from engine.model.kernels.reference import masked_attention
from engine.model.layout import make_layout


def test_the_papers_example():
    row = make_layout([([1, 2, 3], [[4, 5], [6]])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]  # eq. 10
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3]  # eq. 11: responses continue after the prompt
    assert row.targets.tolist() == [4, 5, 6]
    assert row.scored.tolist() == [2, 3, 2]  # a response's first token is scored by the prompt's last
    visible = [[c == "1" for c in line] for line in ("100000", "110000", "111000", "111100", "111110", "111001")]
    assert row.mask.tolist() == visible  # Figure 2


def test_without_sharing_every_response_has_its_own_prompt():
    row = make_layout([([1, 2], [[4, 5], [6]])], shared_prompt=False)
    assert row.token_ids.tolist() == [1, 2, 4, 5, 1, 2, 6]
    assert row.lengths == (2, 1)
    assert not row.mask[4:, :4].any()


def test_an_empty_response_scores_nothing_and_counts():
    row = make_layout([([1, 2], [[], [3]])])
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
    row = make_layout(groups, shared)
    assert row.real.all()
    assert sum(row.lengths) == row.targets.numel() == row.scored.numel()
    flat = [token for _, responses in groups for response in responses for token in response]
    assert row.targets.tolist() == flat
    seen = row.mask.sum(1)
    assert torch.equal(seen, row.positions + 1)  # every token sees exactly the tokens before it in its own sequence


@given(groups, st.booleans(), st.integers(1, 12))
def test_aligned_adds_filler_that_nothing_sees(groups, shared, multiple):
    row = make_layout(groups, shared)
    aligned = row.aligned(multiple)
    assert aligned.size % multiple == 0
    assert 0 <= aligned.size - row.size < multiple
    assert aligned.token_ids[: row.size].tolist() == row.token_ids.tolist()
    assert torch.equal(aligned.mask[: row.size, : row.size], row.mask)
    assert not aligned.mask[: row.size, row.size :].any()
    assert aligned.scored.tolist() == row.scored.tolist()
    assert aligned.targets.tolist() == row.targets.tolist()
    assert torch.equal(aligned.mask.sum(1), aligned.positions + 1)
    assert aligned.real.tolist() == [True] * row.size + [False] * (aligned.size - row.size)


def test_ranks_take_an_early_and_a_late_chunk():
    row = make_layout([([1, 2, 3], [[4, 5], [6, 7, 8]])])
    first = row.shard(0, 2)
    second = row.shard(1, 2)
    assert first.rows.tolist() == [0, 1, 6, 7]
    assert second.rows.tolist() == [2, 3, 4, 5]
    assert first.token_ids.tolist() == [1, 2, 7, 8]
    assert second.positions.tolist() == [2, 3, 4, 3]
    assert first.targets.tolist() == [8]  # scored at the row of token 7
    assert first.kept.tolist() == [4]
    assert second.targets.tolist() == [4, 5, 6, 7]  # token 6 is scored by the prompt's last, in row 2
    assert second.scored.tolist() == [0, 1, 0, 3]
    assert second.kept.tolist() == [0, 1, 2, 3]


@given(groups, st.booleans(), st.integers(2, 4))
def test_shards_divide_the_rows_and_the_scored_tokens(groups, shared, size):
    row = make_layout(groups, shared).aligned(2 * size)
    shards = [row.shard(rank, size) for rank in range(size)]
    together = torch.cat([shard.rows for shard in shards])
    assert sorted(together.tolist()) == list(range(row.size))
    assert sorted(torch.cat([shard.kept for shard in shards]).tolist()) == list(range(row.targets.numel()))
    assert torch.equal(together[shards[0].row_order], torch.arange(row.size))
    for shard in shards:
        assert shard.size * size == row.size == shard.row_size
        assert torch.equal(shard.rows[shard.scored], row.scored[shard.kept])
        assert torch.equal(shard.targets, row.targets[shard.kept])
        assert torch.equal(shard.token_ids, row.token_ids[shard.rows])
        assert torch.equal(shard.positions, row.positions[shard.rows])
        assert torch.equal(shard.mask, row.mask[shard.rows])
        assert torch.equal(shard.real, row.real[shard.rows])


@given(groups, st.booleans(), st.integers(1, 3))
def test_parts_cover_each_row_once_and_list_what_it_sees(groups, shared, size):
    row = make_layout(groups, shared).aligned(2 * size)
    for shard in (row.shard(rank, size) for rank in range(size)):
        rebuilt = torch.zeros_like(shard.mask)
        assert [part.query for part in shard.parts] == [
            sum(p.length for p in shard.parts[:i]) for i in range(len(shard.parts))
        ]
        for part in shard.parts:
            for i in range(part.length):
                rebuilt[part.query + i, part.keys[: part.prefix + i + 1]] = True
        assert torch.equal(rebuilt, shard.mask)


@given(groups, st.booleans(), st.integers(1, 3))
def test_attention_of_the_shards_is_that_of_the_whole(groups, shared, size):
    row = make_layout(groups, shared).aligned(2 * size)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(row.size, heads, 4, generator=generator, dtype=torch.float64) for heads in (2, 1, 1))
    shards = [row.shard(rank, size) for rank in range(size)]
    parts = torch.cat([cpu.by_segment(q[shard.rows], k, v, shard) for shard in shards])
    torch.testing.assert_close(parts[shards[0].row_order], masked_attention(q, k, v, row))


def test_uneven_cuts_are_refused():
    row = make_layout([([1, 2, 3], [[4, 5]])])
    with pytest.raises(ValueError, match="5 rows.*2·2"):
        row.shard(0, 2)
    with pytest.raises(ValueError, match="align the whole"):
        row.aligned(6).shard(0, 3).aligned(4)
    with pytest.raises(ValueError, match="in 2 shards"):
        row.aligned(8).shard(0, 2).shard(0, 2)
