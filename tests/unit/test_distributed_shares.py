"""Shares of samples: all of them, once, about the same work, as datasets would cut them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patternsearch.calibration.shares import balanced_order, share_of

WORK = st.lists(st.floats(0, 1e18), max_size=40)


@given(work=WORK, num_shares=st.integers(1, 9))
def test_balanced_order_is_a_permutation(work, num_shares):
    assert sorted(balanced_order(work, num_shares)) == list(range(len(work)))


@given(work=WORK, num_shares=st.integers(1, 9))
def test_shares_cover_the_order(work, num_shares):
    order = balanced_order(work, num_shares)
    shares = [share_of(order, share, num_shares) for share in range(num_shares)]
    assert [item for share in shares for item in share] == order


@pytest.mark.parametrize(("size", "num_shares"), [(2, 2), (7, 3), (8, 4), (11, 2)])
def test_share_is_the_split_of_datasets(size, num_shares):
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    order = list(range(size))[::-1]
    whole = datasets.Dataset.from_dict({"item": order})
    for share in range(num_shares):
        split = split_dataset_by_node(whole, rank=share, world_size=num_shares)
        assert share_of(order, share, num_shares) == list(split["item"])


@given(
    work=st.lists(st.sampled_from([1.0, 4.0, 16.0, 64.0]), min_size=4, max_size=40),
    num_shares=st.integers(2, 4),
)
def test_shares_differ_by_at_most_one_item_of_work(work, num_shares):
    order = balanced_order(work, num_shares)
    loads = [sum(work[i] for i in share_of(order, s, num_shares)) for s in range(num_shares)]
    assert max(loads) <= sum(work) / num_shares + max(work)
