"""Rank slices: global heads, kv heads that the query heads read, nothing lost, nothing twice."""

import pytest

from patternsearch.errors import InputError
from patternsearch.model.tensor_parallel import rank_slices


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (32, 32), (32, 1), (64, 4)])
def test_rank_slices_cover_every_head_once(num_heads, num_kv_heads, size):
    slices = rank_slices(num_heads, num_kv_heads, size)
    assert [s.rank for s in slices] == list(range(size))
    queries = [h for s in slices for h in range(*s.query_heads)]
    assert queries == list(range(num_heads))
    for s in slices:
        group = num_heads // num_kv_heads
        assert set(range(*s.kv_heads)) == {h // group for h in range(*s.query_heads)}


def test_rank_slices_replicate_kv_heads():
    slices = rank_slices(32, 4, 8)
    assert [s.kv_heads for s in slices] == [(r // 2, r // 2 + 1) for r in range(8)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "message"),
    [
        (9, 3, 2, "9 query heads"),
        (24, 8, 3, "8 kv heads"),
        (8, 3, 2, "3 kv"),
        (8, 8, 0, "at least 1"),
    ],
)
def test_rank_slices_refuses_sizes_that_do_not_divide(num_heads, num_kv_heads, size, message):
    with pytest.raises(InputError, match=message):
        rank_slices(num_heads, num_kv_heads, size)
