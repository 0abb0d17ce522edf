"""Entries that stand at each other's heads are named; entries that fit everywhere stay."""

import numpy as np
import pytest

from patternsearch.validation.swaps import _swaps

EXACT, NEAR, FAR = 0.0, 0.02, 0.1


def costs(order):
    """Entry e belongs to head order[e]: exact there, off elsewhere."""
    random = np.random.default_rng(0)
    cost = random.uniform(NEAR, FAR, (len(order), len(order)))
    cost[np.arange(len(order)), order] = EXACT
    return cost


def test_entries_at_home_are_not_touched():
    assert _swaps(3, costs(range(6))) == []


@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 5)])
def test_a_swap_is_named(a, b):
    order = list(range(6))
    order[a], order[b] = b, a
    assert _swaps(3, costs(order)) == [f"layer 3: the entries of heads {a} and {b} are swapped"]


def test_a_swap_with_an_entry_that_fits_everywhere_is_named():
    order = [0, 4, 2, 3, 1, 5]
    cost = costs(order)
    cost[[0, 4, 5]] = EXACT  # dense entries capture all mass at any head
    assert _swaps(3, cost) == ["layer 3: the entries of heads 1 and 4 are swapped"]


def test_a_cycle_is_named_entry_by_entry():
    assert _swaps(0, costs([1, 2, 0, 3])) == [
        "layer 0: the entry of head 0 fits head 1",
        "layer 0: the entry of head 1 fits head 2",
        "layer 0: the entry of head 2 fits head 0",
    ]


def test_entries_that_fit_nowhere_are_not_called_swapped():
    random = np.random.default_rng(1)
    assert _swaps(0, random.uniform(0.05, 0.06, (5, 5))) == []
