"""What scoring computes another way on a GPU gives what the plain way gives."""

import pytest
import torch

from patternsearch.kernels.index import rank_blocks
from patternsearch.kernels.index.select import select_top
from patternsearch.scoring import vertical_slash
from patternsearch.scoring.tile_sets import rank_tiles


def causal(scores):
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, float("-inf"))


@pytest.mark.parametrize("tiles", [1, 2, 9, 40])
@pytest.mark.parametrize("budget", [1, 2, 8, 40])
@pytest.mark.parametrize("has_ties", [False, True])
def test_ranking_what_was_selected_is_ranking_all(tiles, budget, has_ties):
    budget = min(budget, tiles)
    scores = torch.randn(3, tiles, tiles, generator=torch.Generator().manual_seed(tiles))
    scores = causal(scores.round() if has_ties else scores)
    assert torch.equal(rank_tiles(scores, budget), rank_blocks(scores)[..., :budget])
    above = torch.ones(tiles, tiles, dtype=torch.bool).triu(1)
    undefined = scores.masked_fill(above, float("nan"))
    ours = rank_tiles(undefined, budget, select_top)
    theirs = rank_blocks(scores)[..., :budget]
    query = torch.arange(tiles)[:, None]
    counts = theirs <= query  # later tiles fill up, whichever
    assert torch.equal(ours <= query, counts)
    assert torch.equal(ours[counts], theirs[counts])


@pytest.mark.parametrize("n", [100, 8191, 8192, 8256, 12289, 16384])
def test_cut_products_are_the_products(n):
    generator = torch.Generator().manual_seed(n)
    mass = torch.rand(2, 12, n, generator=generator)
    left_out = (torch.rand(2, n, 4, generator=generator) < 0.3).float()
    products = vertical_slash._products(mass, left_out)
    assert products.dtype == torch.float64
    exact = torch.bmm(mass.double(), left_out.double())
    torch.testing.assert_close(products, exact, rtol=1e-5, atol=0)
