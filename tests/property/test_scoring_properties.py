"""What must hold of scores whatever q, k and the budgets are."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import region_rows
from patternsearch.scoring.engine import LayerScorer
from support.planted import KINDS, planted_qk

LAYERS = st.builds(
    planted_qk,
    n=st.integers(1, 420),
    heads=st.just(2),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.just(32),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=2),
    seed=st.integers(0, 2**20),
    sharpness=st.floats(0, 30),
)
TILES = st.sampled_from([64, 128])
CONSUMERS = st.sampled_from(["patternsearch", "minference", "vllm"])
CANDIDATES = st.one_of(
    st.just(Dense()),
    st.builds(AShape, sink=st.integers(0, 500), window=st.integers(1, 500), tile=TILES),
    st.builds(
        VerticalSlashSpread,
        vertical=st.integers(0, 500),
        diagonals=st.integers(0, 8),
        tile=TILES,
        last_q=st.integers(1, 80),
        spread_rows=st.integers(1, 80),
    ),
    st.builds(
        VerticalSlashLastQ,
        vertical=st.integers(0, 500),
        slash=st.integers(0, 500),
        tile=st.just(64),
        last_q=st.integers(1, 80),
    ),
    st.builds(
        BlockSparse,
        blocks=st.integers(1, 8),
        tile=TILES,
        estimator=st.sampled_from(["pooled_query", "pooled"]),
    ),
)
BUDGETS = ("sink", "window", "vertical", "slash", "diagonals", "blocks")


def score(layer, candidates, consumer="patternsearch"):
    q, k, _ = layer
    scorer = LayerScorer(tuple(dict.fromkeys(candidates)), oracle=True, consumer=consumer)
    return scorer.score(q, k, scale=q.shape[-1] ** -0.5)


@settings(max_examples=40, deadline=None)
@given(LAYERS, st.lists(CANDIDATES, min_size=1, max_size=5), CONSUMERS)
def test_masses_and_densities_are_fractions_and_regions_add_up(layer, candidates, consumer):
    scores = score(layer, candidates, consumer)
    n = layer[0].shape[2]
    for values in (scores.mass, scores.logical, scores.density):
        present = values[~np.isnan(values)]
        assert present.min() >= 0.0
        assert present.max() <= 1.0
    weighted = np.nansum(scores.mass[..., 1:] * region_rows(n), axis=-1) / n
    np.testing.assert_allclose(weighted, scores.mass[..., 0], atol=1e-6)
    assert np.all(scores.logical <= scores.mass[..., 0] + 1e-6) or consumer != "patternsearch"


@settings(max_examples=40, deadline=None)
@given(LAYERS, CANDIDATES, st.data())
def test_a_larger_budget_never_loses_mass_or_density(layer, candidate, data):
    budgets = [name for name in BUDGETS if hasattr(candidate, name)]
    larger = candidate.model_copy(
        update={name: getattr(candidate, name) + data.draw(st.integers(0, 300)) for name in budgets}
    )
    for consumer in ("patternsearch", "minference"):
        scores = score(layer, (candidate, larger), consumer)
        half = len(scores.specs) // 2
        small, large = slice(0, max(1, half)), slice(half, None)
        np.testing.assert_array_compare(
            np.less_equal,
            np.nan_to_num(scores.mass[:, small]),
            np.nan_to_num(scores.mass[:, large]) + 1e-5,
        )
        assert np.all(scores.density[:, small] <= scores.density[:, large] + 1e-12)
        assert np.all(scores.logical[:, small] <= scores.logical[:, large] + 1e-5)
        assert np.all(scores.tiles[:, small] <= scores.tiles[:, large])


@settings(max_examples=25, deadline=None)
@given(LAYERS, TILES)
def test_everything_selected_is_dense(layer, tile):
    everything = (
        AShape(sink=0, window=1000, tile=tile),
        AShape(sink=1000, window=1, tile=tile),
        VerticalSlashSpread(vertical=0, diagonals=100, tile=tile),
        VerticalSlashSpread(vertical=1000, diagonals=0, tile=tile),
        VerticalSlashLastQ(vertical=0, slash=1000, tile=64),
        VerticalSlashLastQ(vertical=1000, slash=0, tile=64),
        BlockSparse(blocks=100, tile=tile),
    )
    for consumer in ("patternsearch", "minference"):
        scores = score(layer, everything, consumer)
        np.testing.assert_allclose(np.nan_to_num(scores.mass, nan=1.0), 1.0, atol=1e-5)
        np.testing.assert_allclose(scores.logical, 1.0, atol=1e-5)
        np.testing.assert_allclose(scores.density, 1.0, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(LAYERS, st.lists(CANDIDATES, min_size=2, max_size=6, unique=True))
def test_a_candidate_scores_the_same_in_any_company(layer, candidates):
    together = score(layer, candidates)
    for candidate in candidates:
        alone = score(layer, (candidate,))
        rows = [row for row, (other, _) in enumerate(together.specs) if other == candidate]
        np.testing.assert_allclose(together.mass[:, rows], alone.mass, atol=1e-6)
        np.testing.assert_array_equal(together.tiles[:, rows], alone.tiles)
        np.testing.assert_array_equal(together.columns[:, rows], alone.columns)
        np.testing.assert_array_equal(together.density[:, rows], alone.density)
