"""The sample of rows: strata that cover, choices without favour, variances without bias."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.patterns.geometry import query_segments, region_rows
from patternsearch.patterns.row_sampling import EDGE_TILES, sample_rows

FRACTIONS = st.sampled_from([1 / 64, 1 / 8, 1 / 3, 0.5, 0.99])


@settings(max_examples=60)
@given(n=st.integers(1, 20_000), fraction=FRACTIONS, seed=st.integers(0, 9))
def test_sample_stands_for_every_row_of_every_region(n, fraction, seed):
    sample = sample_rows(n, fraction, seed)
    rows = sample.end_row - sample.first_row
    total = np.bincount(sample.region, sample.weights * rows, minlength=4)
    np.testing.assert_allclose(total, region_rows(n))
    assert (np.diff(sample.segments) > 0).all()


@settings(max_examples=60)
@given(n=st.integers(1, 20_000), fraction=FRACTIONS)
def test_edge_tiles_and_partial_segments_are_always_there(n, fraction):
    sample = sample_rows(n, fraction, 0)
    bounds, _ = query_segments(n, 64)
    tile = bounds[:-1] // 64
    edge = (tile < EDGE_TILES) | (tile > (n - 1) // 64 - EDGE_TILES)
    always = (np.diff(bounds) < 64) | edge
    assert set(np.flatnonzero(always)) <= set(sample.segments)
    exact = np.isin(sample.segments, np.flatnonzero(always))
    assert (sample.weights[exact] == 1).all()


@pytest.mark.parametrize("fraction", [1 / 8, 1 / 2])
def test_sample_is_about_the_fraction(fraction):
    sample = sample_rows(131_072, fraction, 0)
    assert fraction <= len(sample.segments) / 2048 <= fraction + 0.01


def test_same_seed_same_sample_and_another_seed_another():
    first, again = sample_rows(8192, 1 / 8, 3, 7), sample_rows(8192, 1 / 8, 3, 7)
    assert np.array_equal(first.segments, again.segments)
    for other in (sample_rows(8192, 1 / 8, 4, 7), sample_rows(8192, 1 / 8, 3, 8)):
        assert not np.array_equal(first.segments, other.segments)


def estimate(sample, values):
    """Sum and variance by region, from the definitions."""
    sums, variances = np.zeros(4), np.zeros(4)
    for stratum in range(len(sample.sizes)):
        mine = sample.stratum == stratum
        y = values[sample.segments[mine]]
        size, m, region = sample.sizes[stratum], len(y), sample.region[mine][0]
        assert m == sample.chosen[stratum]
        sums[region] += size * y.mean()
        if m < size:
            variances[region] += size**2 * (1 - m / size) * y.var(ddof=1) / m
    return sums, variances


def test_weights_are_the_textbook_estimate():
    values = np.random.default_rng(0).uniform(20, 64, len(query_segments(10_000, 64)[1]))
    sample = sample_rows(10_000, 1 / 8, 0)
    sums, variances = estimate(sample, values)
    y = values[sample.segments]
    np.testing.assert_allclose(np.bincount(sample.region, sample.weights * y), sums)
    mean = np.bincount(sample.stratum, y) / sample.chosen
    squares = np.bincount(sample.stratum, (y - mean[sample.stratum]) ** 2)
    ours = np.bincount(sample.stratum_region, sample.variance_weights * squares)
    np.testing.assert_allclose(ours, variances, atol=1e-9)


def test_estimates_are_unbiased_and_their_variance_is():
    n = 8192
    _, region = query_segments(n, 64)
    values = np.random.default_rng(1).uniform(20, 64, len(region)) + np.linspace(0, 9, len(region))
    truth = np.bincount(region, values)
    trials = [estimate(sample_rows(n, 1 / 4, seed), values) for seed in range(800)]
    sums, variances = (np.array([trial[at] for trial in trials]) for at in (0, 1))
    spread = sums.std(0) / np.sqrt(len(trials))
    assert (np.abs(sums.mean(0) - truth) < 4 * spread).all()
    np.testing.assert_allclose(variances.mean(0), sums.var(0), rtol=0.2)
