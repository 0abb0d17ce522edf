"""Scores from a sample of rows: exact where nothing is left out, unbiased and honest elsewhere."""

import itertools

import numpy as np
import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.kernels.score.sampled import near_masses, unit_column_sums
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.row_sampling import RowSample
from patternsearch.schema.scores import LOW_COLUMNS, SAMPLED_COLUMNS, SCORES_COLUMNS
from patternsearch.scoring.accounts import _ALLOWANCE
from patternsearch.scoring.engine import LayerScorer
from patternsearch.scoring.regions import SampledRegions, SampleTables
from patternsearch.scoring.table import sample_table
from support.planted import planted_qk

CANDIDATES = [
    Dense(),
    *(AShape(sink=s, window=w, tile=t) for s, w, t in [(64, 128, 64), (16, 300, 128)]),
    *(
        VerticalSlashSpread(vertical=v, diagonals=d, tile=t)
        for v in (30, 100)
        for d in (2, 5)
        for t in (64, 128)
    ),
    *(VerticalSlashLastQ(vertical=v, slash=s, tile=64) for v in (40, 90) for s in (120, 300)),
    *(
        BlockSparse(blocks=b, tile=t, estimator=e)
        for b in (2, 6)
        for t in (64, 128)
        for e in ("pooled_query", "pooled")
    ),
]

DECIDED = [
    Dense(),
    AShape(sink=64, window=128, tile=64),
    *(VerticalSlashSpread(vertical=v, diagonals=8, tile=64) for v in (64, 256, 512)),
    *(BlockSparse(blocks=b, tile=64) for b in (8, 32, 64)),
]


def layer(n, seed=0, num_heads=4, num_kv=2, d=16):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, num_heads, n, d, generator=generator) * 1.5
    k = torch.randn(1, num_kv, n, d, generator=generator)
    k[:, :, ::61] *= 2.5  # some strong keys
    return q, k


def probabilities(q, k, scale):
    """p [Hq, n, n] and the rows' log-sum-exp."""
    keys = k[0].repeat_interleave(q.shape[1] // k.shape[1], 0)
    logits = torch.einsum("hid,hjd->hij", q[0], keys) * scale
    logits = logits.masked_fill(torch.ones(logits.shape[1:]).triu(1).bool(), -torch.inf)
    return logits.softmax(-1), logits.logsumexp(-1)


@pytest.mark.parametrize("consumer", ["patternsearch", "minference"])
@pytest.mark.parametrize("n", [300, 777])
def test_sample_of_all_rows_equals_the_exact_scores(n, consumer):
    q, k = layer(n)
    exact = LayerScorer(CANDIDATES, consumer=consumer).score(q, k, scale=0.25)
    # Just below 1, so that the sampled path runs; its strata are then taken whole.
    whole = LayerScorer(CANDIDATES, consumer=consumer, row_sample=1 - 1e-9)
    ours = whole.score(q, k, scale=0.25)
    np.testing.assert_allclose(ours.mass, exact.mass, atol=2e-6)
    for name in ("density", "tiles", "columns"):
        assert np.array_equal(getattr(ours, name), getattr(exact, name)), name
    assert ours.error is not None
    assert np.nanmax(ours.error) == 0
    np.testing.assert_allclose(ours.low, ours.mass)
    known = ~np.isnan(ours.logical)
    np.testing.assert_allclose(ours.logical[known], exact.logical[known], atol=2e-6)
    kinds = {spec.kind for (spec, _), is_known in zip(ours.specs, known[0], strict=True)
             if is_known}  # fmt: skip
    assert kinds == {"dense", "vertical_slash", "block_sparse"}


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("step", [1, 4, 16])
def test_column_sums_are_sums_of_probabilities(step, with_lse, monkeypatch):
    import patternsearch.kernels.score.sampled as module

    monkeypatch.setattr(module, "_SUMS_ELEMENTS", {"cpu": 2**15, "cuda": 2**15})
    q, k = layer(400)
    units = tuple(
        range(start, min(start - start % 64 + 64, 400), step)
        for start in (0, 1, 130, 131, 140, 327, 384, 385, 390)
        if step > 1 or start % 64 == 0
    )
    p, lse = probabilities(q, k, 0.25)
    seen = 0
    for piece in unit_column_sums(q, k, scale=0.25, lse=lse if with_lse else None, units=units):
        for place, unit in enumerate(units[piece.units]):
            ours = piece.sums[:, :, place].flatten(1)
            theirs = p[piece.heads, list(unit)].sum(1)[:, : ours.shape[1]]
            torch.testing.assert_close(ours[:, :400], theirs, atol=1e-5, rtol=1e-5)
            assert (ours[:, 400:] == 0).all()
            seen += len(theirs)
    assert seen == 4 * len(units)


@pytest.mark.parametrize("n", [1, 63, 200, 450])
def test_near_masses_are_those_of_three_tiles(n, monkeypatch):
    import patternsearch.kernels.score.sampled as module

    monkeypatch.setattr(module, "_PRODUCT_ELEMENTS", {"cpu": 2**16, "cuda": 2**16})
    q, k = layer(n)
    p, lse = probabilities(q, k, 0.25)
    ours = near_masses(q, k, scale=0.25, lse=lse)
    for i in range(n):
        tile = i // 64
        wanted = [0, tile if tile > 0 else None, tile - 1 if tile > 1 else None]
        for which, key_tile in enumerate(wanted):
            mass = torch.zeros(4)
            if key_tile is not None:
                mass = p[:, i, key_tile * 64 : key_tile * 64 + 64].sum(-1)
            torch.testing.assert_close(ours[:, i, which], mass, atol=1e-5, rtol=1e-5)


def draw(pairs):
    """Two of each of two strata of five rows, then a stratum of one row taken whole."""
    rows = np.array([*pairs[0], *(5 + at for at in pairs[1]), 10])
    return RowSample(
        stride=64, first_row=rows, num_rows=np.ones(5, dtype=np.int64),
        region=np.array([0, 0, 1, 1, 1]), stratum=np.array([0, 0, 1, 1, 2]),
        sizes=np.array([5, 5, 1]), chosen=np.array([2, 2, 1]),
        row_stratum=np.array([0] * 5 + [1] * 5 + [2]),
    )  # fmt: skip


def test_correction_by_what_is_known_leaves_the_estimate_unbiased():
    """Over all draws, exactly, however badly a straight line fits."""
    random = np.random.default_rng(0)
    known = torch.from_numpy(random.uniform(0, 1, (2, 11, 2)))
    values = known[..., :1].square().transpose(1, 2) + torch.from_numpy(
        random.uniform(0, 1, (2, 3, 11))
    )
    truth = torch.stack([values[..., :5].sum(-1), values[..., 5:].sum(-1)], -1)
    pairs = list(itertools.combinations(range(5), 2))
    plain, corrected, variances = [], [], []
    for two in itertools.product(pairs, pairs):
        sample = draw(two)
        mine = values[..., torch.from_numpy(sample.first_row)]
        tables = SampleTables(sample, mine.device)
        plain.append(SampledRegions(tables).sum(mine)[..., :2])
        both = SampledRegions(tables, known).sum(mine)
        corrected.append(both[..., :2])
        variances.append(both[..., 4:6])
    for estimates in (plain, corrected):
        torch.testing.assert_close(torch.stack(estimates).mean(0), truth, rtol=1e-10, atol=1e-10)
    assert (torch.stack(corrected) - torch.stack(plain)).abs().max() > 0.01
    spread = torch.stack(corrected).var(0, unbiased=False)
    torch.testing.assert_close(torch.stack(variances).mean(0), spread, rtol=1e-10, atol=1e-10)


def test_correction_makes_a_line_exact():
    known = torch.rand(1, 11, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = 0.2 + 0.7 * known.transpose(1, 2)
    sample = draw([(0, 3), (1, 2)])
    regions = SampledRegions(SampleTables(sample, known.device), known)
    ours = regions.sum(values[..., sample.first_row])
    truth = torch.stack([values[..., :5].sum(-1), values[..., 5:].sum(-1)], -1)
    torch.testing.assert_close(ours[..., :2], truth, atol=1e-2, rtol=0)
    assert ours[..., 4:].max() < 1e-4


@pytest.fixture(scope="module", params=["plain", "corrected"])
def trials(request):
    q, k = layer(4096, num_heads=2, num_kv=1)
    candidates = [CANDIDATES[i] for i in (0, 1, 5, 8, 13, 15)]
    exact = LayerScorer(candidates).score(q, k, scale=0.25)
    lse = probabilities(q, k, 0.25)[1] if request.param == "corrected" else None
    sampled = [
        LayerScorer(candidates, row_sample=1 / 4, row_seed=seed).score(q, k, scale=0.25, lse=lse)
        for seed in range(25)
    ]
    return exact, sampled


def test_estimates_are_unbiased_over_seeds(trials):
    exact, sampled = trials
    mass = np.stack([scores.mass for scores in sampled])
    spread = mass.std(0) / np.sqrt(len(sampled)) + 1e-6
    assert (np.abs(mass.mean(0) - exact.mass) < 5 * spread).all()


def test_lower_bound_holds_about_as_often_as_it_says(trials):
    exact, sampled = trials
    # What is taken off for rounding must not help: a bound at 0 has lost less than that.
    low = np.stack([np.where(s.low > 0, s.low + _ALLOWANCE, s.low) for s in sampled])
    holds = low <= exact.mass + 1e-6
    assert holds[..., 1:, :].mean() >= 0.92
    assert (np.stack([s.low for s in sampled]) <= np.stack([s.mass for s in sampled])).all()


def test_error_is_small_where_heads_are_decided():
    q, k, _ = planted_qk(8192, 3, 3, 64, ("sink", "columns", "diagonals"))
    exact = LayerScorer(DECIDED).score(q, k, scale=64**-0.5)
    decided = exact.mass[..., 0] >= 0.9
    assert decided[:, 1:].any(1).all()
    for seed in range(4):
        ours = LayerScorer(DECIDED, row_sample=1 / 8, row_seed=seed).score(q, k, scale=64**-0.5)
        assert np.abs(ours.mass - exact.mass)[decided][:, 0].max() <= 0.01
        assert ours.error is not None
        assert ours.error[decided][:, 0].max() <= 0.01


def test_dense_is_exact_whatever_the_sample(trials):
    _, sampled = trials
    for scores in sampled:
        assert np.array_equal(scores.mass[:, 0], np.ones((2, 5)))
        assert np.nanmax(scores.error[:, 0]) == 0


def test_oracle_is_refused_with_a_sample():
    with pytest.raises(InputError, match="every row"):
        LayerScorer(CANDIDATES, oracle=True, row_sample=0.5)


def test_table_appends_the_columns_of_sampling():
    q, k = layer(3500)
    scores = LayerScorer(CANDIDATES, row_sample=1 / 8).score(q, k, scale=0.25)
    named = {"sample_id": "a", "source": "b", "split": "calibration", "length": 1500}
    table = sample_table({0: scores}, **named, num_tokens=1500).to_pandas()
    assert tuple(table.columns) == (*SCORES_COLUMNS, *SAMPLED_COLUMNS)
    assert (table["mass_q2_low"] <= table["mass_q2"]).all()


def test_selection_goes_by_the_lower_bound():
    from patternsearch.selection.reading import scores_from_frame
    from patternsearch.selection.statistics import reached_mass

    q, k = layer(3500)
    scores = LayerScorer(CANDIDATES, row_sample=1 / 8).score(q, k, scale=0.25)
    named = {"sample_id": "a", "source": "b", "split": "calibration", "length": 1500}
    frame = sample_table({0: scores}, **named, num_tokens=1500).to_pandas()
    reached = reached_mass(scores_from_frame(frame), "worst", "each")
    low = frame[list(LOW_COLUMNS)].min(axis=1).to_numpy().reshape(reached.shape)
    np.testing.assert_allclose(reached, low, atol=1e-6)
    plain = frame.drop(columns=list(SAMPLED_COLUMNS))
    assert (reached <= reached_mass(scores_from_frame(plain), "worst", "each") + 1e-9).all()


def test_very_long_prompts_are_scored_a_kv_head_at_a_time(monkeypatch):
    import patternsearch.scoring.engine as engine

    q, k = layer(700)
    expected = LayerScorer(CANDIDATES).score(q, k, scale=0.25)
    monkeypatch.setattr(engine, "_TILE_PAIRS", 1)
    ours = LayerScorer(CANDIDATES).score(q, k, scale=0.25)
    np.testing.assert_allclose(ours.mass, expected.mass, atol=1e-6)
    assert np.array_equal(ours.tiles, expected.tiles)
