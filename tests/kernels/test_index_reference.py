"""The online index in PyTorch against the brute-force definitions."""

import numpy as np
import pytest
import torch

from patternsearch.kernels import index
from patternsearch.kernels.index import reference
from support import naive_scoring
from support.closeness import assert_close
from support.planted import planted_qk, random_qk

LENGTHS = [1, 3, 63, 64, 65, 129, 300]


@pytest.fixture(params=[None, 1], ids=["whole", "one kv head at a time"])
def _limit(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(reference, "_LIMIT", {"cpu": request.param, "cuda": request.param})


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize(("last_q", "spread_rows"), [(64, 64), (7, 5), (1, 1000)])
@pytest.mark.parametrize("n", LENGTHS)
def test_spread_scores_match_the_definition(n, last_q, spread_rows):
    q, k, _ = random_qk(n, 4, 2, 64, seed=n)
    p = naive_scoring.probabilities(q, k, 0.125)
    sampling = {"scale": 0.125, "last_q": last_q, "spread_rows": spread_rows}
    both, by_tile = index.spread_scores_by_tile(q, k, tiles=(64, 128), **sampling)
    for tile in (64, 128):
        columns, diagonals = index.spread_scores(q, k, tile=tile, **sampling)
        assert torch.equal(columns, both)
        assert torch.equal(diagonals, by_tile[tile])
        for h in range(4):
            expected = naive_scoring.spread_scores(p[h], last_q, spread_rows, tile)
            assert_close(columns[h], expected[0], what="columns")
            assert_close(diagonals[h], expected[1], what="diagonals")


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("last_q", [64, 5])
@pytest.mark.parametrize("n", LENGTHS)
def test_last_q_scores_match_the_definition(n, last_q):
    q, k, _ = random_qk(n, 4, 2, 80, seed=n)
    p = naive_scoring.probabilities(q, k, 0.1)
    columns, offsets = index.last_q_scores(q, k, scale=0.1, last_q=last_q)
    for h in range(4):
        expected = naive_scoring.last_q_scores(p[h], last_q)
        assert_close(columns[h], expected[0], what="columns")
        assert_close(offsets[h], expected[1], what="offsets")


@pytest.mark.usefixtures("_limit")
@pytest.mark.parametrize("estimator", ["pooled_query", "pooled"])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("n", LENGTHS)
def test_block_scores_match_the_definition(n, tile, estimator):
    q, k, _ = random_qk(n, 4, 2, 64, seed=n)
    scores = index.block_scores(q, k, scale=0.125, tile=tile, estimator=estimator)
    for h in range(4):
        expected = naive_scoring.block_scores(
            q[0, h].double().numpy(), k[0, h // 2].double().numpy(), 0.125, tile, estimator
        )
        assert_close(scores[h], expected, what=estimator)


def test_scores_take_any_strides():
    q, k, _ = planted_qk(130, 4, 2, 64)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    sampling = {"scale": 0.125, "last_q": 64, "spread_rows": 64, "tile": 64}
    for a, b in zip(
        index.spread_scores(*strided, **sampling), index.spread_scores(q, k, **sampling),
        strict=True,
    ):  # fmt: skip
        assert_close(a, b)


def test_rank_puts_forced_entries_first_and_breaks_ties_by_number():
    scores = torch.tensor([[0.0, 5.0, 5.0, 7.0, 5.0, 0.0]])
    assert index.rank(scores, 2).tolist() == [[0, 1, 3, 2, 4, 5]]
    assert index.rank(scores, 0).tolist() == [[3, 1, 2, 4, 0, 5]]
    assert index.rank(scores, 99).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert scores[0, 0] == 0.0, "the scores are not written to"


@pytest.mark.parametrize("entries", [1, 100, 5000])
def test_rank_of_equal_scores_is_the_order_of_entries(entries):
    order = index.rank(torch.full((3, entries), 0.25), 30)
    assert torch.equal(order, torch.arange(entries).expand(3, -1))


def test_rank_agrees_with_a_plain_sort():
    scores = torch.randint(0, 9, (4, 400), generator=torch.Generator().manual_seed(0)).float()
    order = index.rank(scores, 30).numpy()
    for h in range(4):
        expected = naive_scoring.order_of(scores[h].numpy(), set())
        others = [entry for entry in expected if entry >= 30]
        np.testing.assert_array_equal(order[h], [*range(30), *others])


def test_rank_blocks_puts_the_diagonal_first_then_ties_to_the_lower():
    scores = torch.tensor([[1.0, -torch.inf, -torch.inf], [3.0, 0.0, -torch.inf], [2.0, 2.0, 1.0]])
    assert index.rank_blocks(scores).tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1]]
