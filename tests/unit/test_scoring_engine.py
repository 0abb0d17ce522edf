"""Every row of the scores against brute force, for every kind, index and consumer."""

import numpy as np
import pytest
import torch

from patternsearch.errors import InputError, ModelError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.scoring.engine import LayerScorer
from support import naive_scoring
from support.planted import planted_qk, random_qk

CANDIDATES = (
    Dense(),
    AShape(sink=0, window=1, tile=64),
    AShape(sink=128, window=200, tile=64),
    AShape(sink=100, window=64, tile=128),
    AShape(sink=5000, window=5000, tile=128),
    *(
        VerticalSlashSpread(vertical=vertical, diagonals=diagonals, tile=tile)
        for tile in (64, 128)
        for vertical in (0, 64, 300)
        for diagonals in (0, 3, 5)
    ),
    VerticalSlashSpread(vertical=50, diagonals=4, tile=64, last_q=7, spread_rows=5),
    *(
        VerticalSlashLastQ(vertical=vertical, slash=slash, tile=64)
        for vertical in (30, 100)
        for slash in (0, 130, 400)
    ),
    VerticalSlashLastQ(vertical=40, slash=111, tile=64, last_q=9),
    *(
        BlockSparse(blocks=blocks, tile=tile, estimator=estimator)
        for tile in (64, 128)
        for estimator in ("pooled_query", "pooled")
        for blocks in (1, 2, 5)
    ),
)


def assert_matches_brute_force(q, k, scale, scores, consumer="patternsearch"):
    p = naive_scoring.probabilities(q, k, scale)
    group = q.shape[1] // k.shape[1]
    for h in range(q.shape[1]):
        head_q, head_k = q[0, h].double().numpy(), k[0, h // group].double().numpy()
        for row, (candidate, index) in enumerate(scores.specs):
            expected = naive_scoring.naive_row(
                p[h], head_q, head_k, scale, candidate, index, consumer
            )
            where = f"head {h}, {describe(candidate)}, {index}"
            np.testing.assert_allclose(
                scores.mass[h, row], expected.mass, rtol=0, atol=1e-5, err_msg=where
            )
            assert scores.logical[h, row] == pytest.approx(expected.logical, abs=1e-5), where
            assert scores.density[h, row] == pytest.approx(expected.density, abs=1e-12), where
            assert scores.tiles[h, row] == expected.tiles, where
            assert scores.columns[h, row] == expected.columns, where


@pytest.mark.parametrize(
    ("consumer", "make"),
    [("patternsearch", planted_qk), ("patternsearch", random_qk), ("vllm", planted_qk)],
)
@pytest.mark.parametrize("n", [1, 3, 63, 64, 65, 129, 300])
def test_scores_match_brute_force(n, consumer, make):
    q, k, _ = make(n, 2, 1, 64, seed=n)
    scores = LayerScorer(CANDIDATES, oracle=True, consumer=consumer).score(q, k, scale=0.125)
    assert_matches_brute_force(q, k, 0.125, scores, consumer)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (2, 2)], ids=["gqa", "mha"])
def test_scores_match_brute_force_at_a_thousand_tokens(heads, kv_heads):
    few = CANDIDATES[:1] + CANDIDATES[2::3]
    candidates = (
        *few,
        *(
            VerticalSlashLastQ(vertical=vertical, slash=300, tile=tile)
            for vertical, tile in [(100, 64), (100, 128)]
        ),
    )
    q, k, _ = planted_qk(1000, heads, kv_heads, 96, kinds=("columns", "blocks", "diagonals"))
    scores = LayerScorer(candidates, oracle=True).score(q, k, scale=96**-0.5)
    assert_matches_brute_force(q, k, 96**-0.5, scores)


def test_rows_follow_the_candidates_then_none_online_oracle():
    candidates = (BlockSparse(blocks=2, tile=64), Dense(), AShape(sink=1, window=1, tile=64))
    specs = LayerScorer(candidates, oracle=True).specs
    assert specs == (
        (candidates[0], "online"),
        (candidates[0], "oracle"),
        (candidates[1], "none"),
        (candidates[2], "none"),
    )
    assert [index for _, index in LayerScorer(candidates).specs] == ["online", "none", "none"]


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_vertical_of_30_is_scored_as_the_130_that_runs(consumer):
    q, k, _ = planted_qk(600, 2, 1, 64, kinds=("columns",))
    at_30, at_130 = (VerticalSlashLastQ(vertical=v, slash=100, tile=64) for v in (30, 130))
    scores = LayerScorer((at_30, at_130), consumer=consumer).score(q, k, scale=0.125)
    np.testing.assert_array_equal(scores.mass[:, 0], scores.mass[:, 1])
    plain = LayerScorer((at_30, at_130), consumer="minference").score(q, k, scale=0.125)
    assert np.all(plain.mass[:, 0, 0] < plain.mass[:, 1, 0])
    np.testing.assert_array_equal(plain.mass[:, 1], scores.mass[:, 1])


def test_last_q_of_another_tile_is_refused_for_other_consumers():
    candidate = VerticalSlashLastQ(vertical=100, slash=100, tile=128)
    with pytest.raises(InputError, match=r"tile=128.*query tiles of 64"):
        LayerScorer((candidate,), consumer="minference")
    LayerScorer((candidate,))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_activations_name_layer_and_head(value):
    q, k, _ = random_qk(200, 4, 2, 64)
    q[0, 2, 150, 5] = value
    with pytest.raises(ModelError, match=r"layer 7, head 2.*not finite \(1 of 4 heads"):
        LayerScorer(CANDIDATES, oracle=True).score(q, k, scale=0.125, layer=7)


def test_an_lse_of_something_else_is_caught():
    q, k, _ = random_qk(100, 2, 1, 64)
    with pytest.raises(AssertionError, match="lse"):
        LayerScorer((Dense(),)).score(q, k, scale=0.125, lse=torch.zeros(2, 100))


@pytest.mark.parametrize("seed", [0, 1])
def test_planted_heads_want_their_own_pattern(seed):
    candidates = (
        AShape(sink=64, window=64, tile=64),
        VerticalSlashSpread(vertical=64, diagonals=2, tile=64),
        VerticalSlashSpread(vertical=30, diagonals=8, tile=64),
        BlockSparse(blocks=3, tile=64),
    )
    q, k, _ = planted_qk(1024, 5, 5, 64, seed=seed, sharpness=10)
    mass = LayerScorer(candidates).score(q, k, scale=0.125).mass[..., 0]
    dense, sink, columns, diagonals, blocks = mass
    assert sink.min() > 0.9
    assert columns.argmax() == 1
    assert diagonals.argmax() == 2
    assert blocks.argmax() == 3
    assert dense.max() < 0.9
