"""The rule and its statistics, against the obvious way to compute them."""

import numpy as np
import pandas as pd
import pytest

from patternsearch.errors import InputError
from patternsearch.patterns.candidates import (
    KINDS,
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    candidate_from_columns,
)
from patternsearch.selection.aggregate import aggregate
from patternsearch.selection.cost import Work
from patternsearch.selection.options import SelectionOptions, is_expressible
from patternsearch.selection.reading import scores_from_frame
from patternsearch.selection.rule import cheapest
from patternsearch.selection.statistics import over_samples, reached_mass
from support.scores_factory import SMALL_GRID, scores_frame

REGIONS = ["mass_q1", "mass_q2", "mass_q3", "mass_q4"]


@pytest.fixture(scope="module")
def frame():
    return scores_frame(lengths=(1024, 4096), calibration=4, heldout=2, oracle_gap=0.01)


# --- statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 2, 5, 40])
@pytest.mark.parametrize("statistic", ["worst", "p05", "mean"])
def test_over_samples_ignores_missing_values(num_samples, statistic):
    rng = np.random.default_rng(num_samples)
    values = rng.random((num_samples, 3, 7))
    values[rng.random(values.shape) < 0.2] = np.nan
    values[:, 0, 0] = np.nan
    got = over_samples(values, statistic)
    simple = {"worst": np.min, "mean": np.mean, "p05": lambda x: np.percentile(x, 5)}[statistic]
    for at in np.ndindex(3, 7):
        present = values[:, *at][~np.isnan(values[:, *at])]
        expected = simple(present) if len(present) else np.nan
        np.testing.assert_allclose(got[at], expected, rtol=1e-12)


@pytest.mark.parametrize("regions", ["each", "all"])
@pytest.mark.parametrize("statistic", ["worst", "p05", "mean"])
def test_reached_mass_is_the_least_over_lengths_splits_and_regions(frame, statistic, regions):
    scores = scores_from_frame(frame)
    got = reached_mass(scores, statistic, regions)
    columns = ["mass_physical", *(REGIONS if regions == "each" else [])]
    simple = {"worst": "min", "mean": "mean", "p05": lambda x: np.percentile(x, 5)}[statistic]
    online = frame[frame["index"] != "oracle"]
    for (layer, head, *_), rows in online.groupby(
        ["layer", "head", "kind", "window", "diagonals", "blocks", "tile"], dropna=False
    ):
        candidate = candidate_from_columns(rows.iloc[0].to_dict() | _no_gaps(rows.iloc[0]))
        expected = rows.groupby(["length", "split"])[columns].agg(simple).to_numpy().min()
        at = (layer, head, scores.candidates.index(candidate))
        assert got[at] == pytest.approx(expected, abs=1e-6)


def _no_gaps(row):
    return {name: None for name, value in row.items() if pd.isna(value)}


def test_aggregate_equals_a_plain_groupby(frame):
    table = aggregate(frame, target_mass=0.9)
    assert len(table) == 2 * 3 * len(SMALL_GRID) * 2
    keys = ["layer", "head", "length", "kind", "window", "diagonals", "blocks", "tile"]
    online = frame[frame["index"] != "oracle"]
    calibration = online[online["split"] == "calibration"]
    heldout = online[online["split"] == "heldout"]
    oracle = frame[frame["index"] == "oracle"]

    def column(rows, expression):
        grouped = rows.groupby(keys, dropna=False).apply(expression, include_groups=False)
        return table.merge(grouped.rename("expected").reset_index(), on=keys, how="left")[
            "expected"
        ].to_numpy(dtype=float, na_value=np.nan)

    worst_region = lambda rows: rows[REGIONS].to_numpy().min()  # noqa: E731
    expected = {
        "mass_mean": column(calibration, lambda r: r["mass_physical"].mean()),
        "mass_worst": column(calibration, lambda r: r["mass_physical"].min()),
        "mass_worst_region": column(calibration, worst_region),
        "mass_std": column(calibration, lambda r: r["mass_physical"].std(ddof=0)),
        "mass_p05": column(calibration, lambda r: np.percentile(r["mass_physical"], 5)),
        "heldout_mean": column(heldout, lambda r: r["mass_physical"].mean()),
        "heldout_worst": column(heldout, lambda r: r["mass_physical"].min()),
        "heldout_worst_region": column(heldout, worst_region),
        "oracle_mean": column(oracle, lambda r: r["mass_physical"].mean()),
        "density": column(online, lambda r: r["density"].mean()),
        "tiles": column(online, lambda r: r["tiles"].mean()),
        "columns": column(online, lambda r: r["columns"].mean()),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(table[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
    gap = expected["oracle_mean"] - column(online, lambda r: r["mass_physical"].mean())
    np.testing.assert_allclose(table["oracle_gap"], gap, atol=1e-12)
    assert (table["num_samples"] == 4).all()
    assert (table["num_heldout"] == 2).all()


def test_aggregate_shares_won_are_those_of_single_sample_selections(frame):
    table = aggregate(frame, target_mass=0.9)
    sums = table.groupby(["layer", "head", "length"])["share_won"].sum()
    np.testing.assert_allclose(sums, 1.0)
    scores = scores_from_frame(frame)
    length = scores.lengths[0]
    wins = {}
    for sample in range(4):
        cost = Work().head_cost(
            scores.candidates, 1024, length.tiles[sample, 1, 2], length.columns[sample, 1, 2]
        )
        mass = length.mass[:, sample, 1, 2].min(axis=0)
        reached = [c for c in range(len(SMALL_GRID)) if round(mass[c], 6) >= 0.9]
        cheap = min(cost[c] for c in reached)
        best = min(
            (c for c in reached if cost[c] <= 1.02 * cheap),
            key=lambda c: (KINDS.index(SMALL_GRID[c].kind), -mass[c], c),
        )
        wins[best] = wins.get(best, 0) + 0.25
    row = table[(table["layer"] == 1) & (table["head"] == 2) & (table["length"] == 1024)]
    assert {c: s for c, s in enumerate(row["share_won"]) if s > 0} == wins


def test_aggregate_tells_the_mass_at_half_and_double_budget(frame):
    table = aggregate(frame)
    at = table[(table["layer"] == 0) & (table["head"] == 1) & (table["length"] == 4096)]
    mass = dict(zip(SMALL_GRID, at["mass_mean"], strict=True))
    half = dict(zip(SMALL_GRID, at["mass_half_budget"], strict=True))
    double = dict(zip(SMALL_GRID, at["mass_double_budget"], strict=True))
    narrow, wide = AShape(sink=64, window=256, tile=64), AShape(sink=64, window=512, tile=64)
    assert double[narrow] == mass[wide]
    assert half[wide] == mass[narrow]
    assert np.isnan(half[narrow])
    assert double[BlockSparse(blocks=4, tile=64)] == mass[BlockSparse(blocks=8, tile=64)]
    two = VerticalSlashSpread(vertical=64, diagonals=2, tile=64)
    assert double[two] == mass[VerticalSlashSpread(vertical=64, diagonals=4, tile=64)]
    assert np.isnan(half[VerticalSlashSpread(vertical=64, diagonals=4, tile=128)])
    assert np.isnan(half[Dense()])


# --- the rule --------------------------------------------------------------------------------

A, V, B = SMALL_GRID[1], SMALL_GRID[3], SMALL_GRID[6]


@pytest.mark.parametrize(
    ("cost", "mass", "eligible", "chosen"),
    [
        ([9, 3, 2, 1], [1, 0.97, 0.97, 0.97], [1, 1, 1, 1], 3),
        ([9, 3, 2, 1], [1, 0.97, 0.97, 0.97], [1, 1, 1, 0], 2),
        ([9, 1.015, 1.01, 1], [1, 0.96, 0.97, 0.98], [1, 1, 1, 1], 1),
        ([9, 1.03, 1.01, 1], [1, 0.96, 0.97, 0.98], [1, 1, 1, 1], 2),
        ([1.02, 1, 1, 1], [1, 0.96, 0.97, 0.98], [1, 1, 1, 1], 0),
        ([9, 1, 1, 1], [1, 0.96, 0.97, 0.98], [1, 0, 0, 0], 0),
        ([9, 1, 1, 1], [1, 0.96, 0.97, 0.98], [0, 0, 0, 0], -1),
    ],
    ids=["cheapest", "cheapest eligible", "tie to simpler", "tie within tolerance only",
         "tie to dense", "only dense", "none"],
)  # fmt: skip
def test_rule(cost, mass, eligible, chosen):
    got = cheapest(
        np.array(cost, float), np.array(mass), np.array(eligible, bool), (Dense(), A, V, B), 0.02
    )
    assert got == chosen


def test_rule_breaks_ties_within_a_kind_by_mass_then_order():
    candidates = (Dense(), SMALL_GRID[3], SMALL_GRID[4], SMALL_GRID[5])
    cost, eligible = np.array([9, 1, 1.01, 1.0]), np.ones(4, bool)
    assert cheapest(cost, np.array([1, 0.95, 0.96, 0.96]), eligible, candidates, 0.02) == 2
    assert cheapest(cost, np.array([1, 0.95, 0.95, 0.95]), eligible, candidates, 0.02) == 1


def test_work_counts_pairs():
    candidates = (Dense(), A, VerticalSlashSpread(vertical=64, diagonals=4, tile=128))
    tiles, columns = np.array([[10, 7, 3]], float), np.array([[0, 0, 50]], float)
    np.testing.assert_array_equal(
        Work().head_cost(candidates, 256, tiles, columns),
        [[256 * 257 / 2, 7 * 64**2, 3 * 128**2 + 50 * 128]],
    )


# --- options ---------------------------------------------------------------------------------

LAST_Q = VerticalSlashLastQ(vertical=1000, slash=6096, tile=64)
POOLED = BlockSparse(blocks=100, tile=64, estimator="pooled")


@pytest.mark.parametrize(
    ("candidate", "consumers"),
    [
        (Dense(), "patternsearch minference vllm sglang"),
        (AShape(sink=128, window=1024, tile=64), "patternsearch minference"),
        (AShape(sink=128, window=1024, tile=128), "patternsearch"),
        (LAST_Q, "patternsearch minference vllm sglang"),
        (LAST_Q.model_copy(update={"vertical": 30}), "patternsearch minference"),
        (LAST_Q.model_copy(update={"vertical": 31}), "patternsearch minference vllm sglang"),
        (LAST_Q.model_copy(update={"vertical": 29}), "patternsearch"),
        (LAST_Q.model_copy(update={"slash": 99}), "patternsearch"),
        (LAST_Q.model_copy(update={"slash": 100}), "patternsearch minference vllm sglang"),
        (LAST_Q.model_copy(update={"tile": 128}), "patternsearch"),
        (LAST_Q.model_copy(update={"last_q": 128}), "patternsearch"),
        (VerticalSlashSpread(vertical=1000, diagonals=8, tile=64), "patternsearch"),
        (POOLED, "patternsearch minference"),
        (POOLED.model_copy(update={"blocks": 64}), "patternsearch"),
        (BlockSparse(blocks=100, tile=64), "patternsearch"),
    ],
    ids=str,
)
def test_consumers_get_only_what_they_can_run(candidate, consumers):
    everyone = ("patternsearch", "minference", "vllm", "sglang")
    assert [c for c in everyone if is_expressible(candidate, c)] == consumers.split()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_mass": 1.2}, "target_mass is 1.2"),
        ({"max_density": -0.1}, "max_density is -0.1"),
        ({"target_mass": None}, "needs a target mass"),
        ({"budget_ms": 5.0}, "--objective mass"),
        ({"objective": "mass"}, "exactly one budget"),
        ({"objective": "mass", "budget_ms": 5.0, "budget_fraction": 0.5}, "exactly one budget"),
        ({"objective": "mass", "budget_ms": 0.0}, "positive number"),
        ({"kinds": ("vertical",)}, "kinds is vertical"),
        ({"kinds": ()}, "kinds is empty"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tie_tolerance": 1.5}, "tie_tolerance is 1.5"),
    ],
    ids=str,
)
def test_bad_options_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        SelectionOptions(**values)
