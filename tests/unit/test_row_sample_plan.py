"""The sample of rows: strata that cover, choices without favour, variances without bias."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.patterns import row_sampling
from patternsearch.patterns.geometry import query_segments, region_rows
from patternsearch.patterns.row_sampling import EDGE_TILES, MIN_ROWS, sample_rows

FRACTIONS = st.sampled_from([1 / 64, 1 / 8, 1 / 3, 0.5, 0.99, 1.0])


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40_000), fraction=FRACTIONS, seed=st.integers(0, 9))
def test_sample_stands_for_every_row_of_every_region(n, fraction, seed):
    sample = sample_rows(n, fraction, seed)
    total = np.bincount(sample.region, sample.weights * sample.num_rows, minlength=4)
    np.testing.assert_allclose(total, region_rows(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40_000), fraction=FRACTIONS)
def test_units_are_distinct_rows_of_one_tile_and_region_in_order(n, fraction):
    sample = sample_rows(n, fraction, 0)
    rows = np.concatenate([np.array(unit) for unit in sample.units])
    assert len(np.unique(rows)) == len(rows) == sample.num_rows.sum()
    assert rows.max() < n
    for unit, region in zip(sample.units, sample.region, strict=True):
        assert unit[0] // 64 == unit[-1] // 64
        assert 4 * unit[0] // n == 4 * unit[-1] // n == region
    assert (np.diff(sample.first_row) > 0).all()
    assert (np.diff(sample.stratum) >= 0).all()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40_000), fraction=FRACTIONS)
def test_last_tiles_and_cut_tiles_are_always_there(n, fraction):
    sample = sample_rows(n, fraction, 0)
    bounds, _ = query_segments(n, 64)
    length = np.diff(bounds)
    last = bounds[:-1] // 64 > (n - 1) // 64 - EDGE_TILES
    scored = set(itertools.chain.from_iterable(sample.units))
    for s in np.flatnonzero((length < 64) | last):
        assert set(range(bounds[s], bounds[s + 1])) <= scored


@pytest.mark.parametrize("n", [8192, 131_072])
@pytest.mark.parametrize("fraction", [1 / 8, 1 / 3, 1 / 2])
def test_sample_is_about_the_fraction_and_no_fewer_than_the_least(n, fraction):
    sample = sample_rows(n, fraction, 0)
    wanted = max(fraction, MIN_ROWS / n)
    assert wanted <= sample.num_rows.sum() / n <= wanted + 260 / n + 0.01


@pytest.mark.parametrize(
    ("n", "fraction", "unit_rows"),
    [
        (8192, 1 / 8, 8),
        (8192, 1 / 2, 16),
        (131_072, 1 / 8, 4),
        (2**18, 1 / 8, 8),
        (2**20, 1 / 8, 32),
    ],
)
def test_units_are_small_unless_that_would_be_very_many(n, fraction, unit_rows):
    assert sample_rows(n, fraction, 0).num_rows.max() == unit_rows


def test_every_tile_of_a_short_prompt_is_looked_at():
    for n in (4096, 8192, 32_768):
        sample = sample_rows(n, 1 / 4, 0)
        assert len(np.unique(sample.first_row // 64)) == n // 64


def test_same_seed_same_sample_and_another_seed_another():
    first, again = sample_rows(8192, 1 / 8, 3, 7), sample_rows(8192, 1 / 8, 3, 7)
    assert np.array_equal(first.first_row, again.first_row)
    for other in (sample_rows(8192, 1 / 8, 4, 7), sample_rows(8192, 1 / 8, 3, 8)):
        assert not np.array_equal(first.first_row, other.first_row)


def estimate(sample, values):
    """Sum and variance by region, from the definitions; values are by row."""
    sums, variances = np.zeros(4), np.zeros(4)
    by_unit = np.array([values[list(unit)].sum() for unit in sample.units])
    for stratum in range(len(sample.sizes)):
        mine = sample.stratum == stratum
        y = by_unit[mine]
        size, m, region = sample.sizes[stratum], len(y), sample.region[mine][0]
        assert m == sample.chosen[stratum]
        sums[region] += size * y.mean()
        if m < size:
            variances[region] += size**2 * (1 - m / size) * y.var(ddof=1) / m
    return sums, variances


def test_weights_are_the_textbook_estimate():
    values = np.random.default_rng(0).uniform(0, 1, 10_000)
    sample = sample_rows(10_000, 1 / 8, 0)
    sums, variances = estimate(sample, values)
    y = np.array([values[list(unit)].sum() for unit in sample.units])
    np.testing.assert_allclose(np.bincount(sample.region, sample.weights * y), sums)
    mean = np.bincount(sample.stratum, y) / sample.chosen
    squares = np.bincount(sample.stratum, (y - mean[sample.stratum]) ** 2)
    ours = np.bincount(sample.stratum_region, sample.variance_weights * squares)
    np.testing.assert_allclose(ours, variances, atol=1e-9)


def test_expectation_over_all_samples_is_the_sum(monkeypatch):
    """Enumerate what a stratum may give: estimate and variance are unbiased exactly."""
    monkeypatch.setattr(row_sampling, "MIN_ROWS", 1)
    n = 1024
    values = np.random.default_rng(2).uniform(0, 1, n)
    tickets = {}

    def lottery(size, key):
        return np.array([tickets.get(at, size + at) for at in range(size)], dtype=np.uint64)

    monkeypatch.setattr(row_sampling, "_lottery", lottery)
    sample = sample_rows(n, 1 / 8, 0)
    # The first stratum is the first tile: 16 units of 4 rows, of which it gives two.
    assert (sample.stride, sample.sizes[0], sample.chosen[0]) == (16, 16, 2)
    truth = values[:64].sum()
    sums, variances = [], []
    base = estimate(sample, values * (np.arange(n) >= 64))
    for pair in itertools.combinations(range(16), 2):
        tickets = dict(zip(pair, (0, 1), strict=True))
        drawn = estimate(sample_rows(n, 1 / 8, 0), values)
        sums.append(drawn[0][0] - base[0][0])
        variances.append(drawn[1][0] - base[1][0])
    np.testing.assert_allclose(np.mean(sums), truth, rtol=1e-12)
    np.testing.assert_allclose(np.mean(variances), np.var(sums), rtol=1e-9)


def test_lottery_favours_no_unit():
    counts = np.zeros(8192)
    for seed in range(400):
        for unit in sample_rows(8192, 1 / 4, seed).units:
            counts[list(unit)] += 1
    drawn = counts[: 8192 - 64 * EDGE_TILES]
    # 100 of 400 expected, each with a binomial spread of 9; unit sizes make 8 rows move together.
    assert abs(drawn.mean() - 100) < 1e-9
    assert np.abs(drawn - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


def test_estimates_are_unbiased_and_their_variance_is():
    n = 8192
    values = np.random.default_rng(1).uniform(0, 1, n) + np.linspace(0, 9, n)
    truth = values.reshape(4, -1).sum(1)
    trials = [estimate(sample_rows(n, 1 / 4, seed), values) for seed in range(200)]
    sums, variances = (np.array([trial[at] for trial in trials]) for at in (0, 1))
    spread = sums.std(0) / np.sqrt(len(trials))
    assert (np.abs(sums.mean(0) - truth) < 4 * spread).all()
    np.testing.assert_allclose(variances.mean(0), sums.var(0), rtol=0.35)
