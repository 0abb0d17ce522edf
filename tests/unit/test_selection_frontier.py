"""The frontier's tables are selections swept, and estimators compared on equal budgets."""

import json
from itertools import pairwise

import numpy as np
import pytest

from patternsearch.errors import InputError
from patternsearch.patterns.candidates import BlockSparse, Dense, VerticalSlashSpread
from patternsearch.selection.cost import Work
from patternsearch.selection.frontier import frontier
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.reading import scores_from_frame
from patternsearch.selection.select import select_heads
from support.scores_factory import counts, scores_frame


@pytest.fixture(scope="module")
def scores():
    return scores_from_frame(scores_frame(lengths=(1024, 4096), oracle_gap=0.02))


def test_points_are_selections(scores):
    found = frontier(scores, targets=(0.9, 0.7, 0.8))
    assert [(p.target_mass, p.length) for p in found.points] == [
        (target, length) for target in (0.7, 0.8, 0.9) for length in (1024, 4096)
    ]
    for point in found.points:
        selected = select_heads(scores, SelectionOptions(target_mass=point.target_mass))
        kinds = [entry.pattern.kind for heads in selected.heads for entry in heads]
        assert point.heads_by_kind == {k: kinds.count(k) for k in point.heads_by_kind}
        at = [e.lengths[(1024, 4096).index(point.length)] for h in selected.heads for e in h]
        assert point.density == pytest.approx(np.mean([a.density for a in at]), abs=1e-6)
        if point.length == 4096:
            assert point.cost == pytest.approx(selected.cost)
            assert point.speed_up == pytest.approx(selected.dense_cost / selected.cost)


def test_higher_targets_never_cost_less(scores):
    points = [p for p in frontier(scores).points if p.length == 4096]
    costs = [p.cost for p in points]
    assert all(b >= a * 0.98 for a, b in pairwise(costs))
    assert costs[-1] > costs[0]


def rows_matter(rng, length, sample, layer, head, candidate):
    """More sampled rows find more, the level rises with the budget."""
    level = 0.6 + 0.3 * counts(candidate, length)[2]
    if candidate.kind == "vertical_slash":
        level += 0.02 * np.log2(candidate.spread_rows / 16)
    if candidate.kind == "block_sparse":
        level += 0.1 * (candidate.estimator == "pooled_query")
    return [level] * 5


VARIANTS = (
    Dense(),
    *(
        VerticalSlashSpread(vertical=64, diagonals=d, tile=64, spread_rows=rows)
        for rows in (16, 64)
        for d in (2, 4)
    ),
    VerticalSlashSpread(vertical=64, diagonals=64, tile=64, spread_rows=64),
    *(BlockSparse(blocks=8, tile=64, estimator=e) for e in ("pooled_query", "pooled")),
)


def test_estimators_are_compared_on_the_budgets_they_share():
    frame = scores_frame(VARIANTS, lengths=(2048,), mass=rows_matter, oracle_gap=0.05)
    found = frontier(frame, SelectionOptions(target_mass=0.75))
    rows = {(r.kind, r.estimator, r.spread_rows): r for r in found.estimators}
    few = rows["vertical_slash", "spread", 16]
    many = rows["vertical_slash", "spread", 64]
    assert (few.num_budgets, many.num_budgets) == (2, 2)
    assert many.mass_online - few.mass_online == pytest.approx(0.04)
    assert few.gap == pytest.approx(0.05)
    densities = [counts(candidate, 2048)[2] for candidate in VARIANTS[1:3]]
    assert few.density == many.density == pytest.approx(sum(densities) / 2)
    assert (few.index_cost, many.index_cost) == (2048 * (64 + 16), 2048 * (64 + 64))
    pooled = rows["block_sparse", "pooled", None]
    streamed = rows["block_sparse", "pooled_query", None]
    assert streamed.mass_online - pooled.mass_online == pytest.approx(0.1)
    assert (pooled.index_cost, streamed.index_cost) == (32 * 32, 32 * 2048)
    assert pooled.cost_at_target == 1.0
    tiles, _, _ = counts(VARIANTS[-1], 2048)
    assert streamed.cost_at_target == pytest.approx(tiles * 64**2 / (2048 * 2049 / 2))


def test_without_oracle_rows_there_is_no_gap():
    frame = scores_frame(VARIANTS, lengths=(2048,), mass=rows_matter)
    assert all(r.gap is None and r.mass_oracle is None for r in frontier(frame).estimators)


def test_document_is_json_and_says_what_was_not_measured(scores):
    document = json.loads(json.dumps(frontier(scores).as_document(), allow_nan=False))
    assert (document["unit"], document["measured"], document["device"]) == ("pairs", False, None)


@pytest.mark.parametrize("targets", [(), (0.5, 1.5)])
def test_bad_targets_are_refused(scores, targets):
    with pytest.raises(InputError, match="targets"):
        frontier(scores, targets=targets)


def test_budgets_are_refused(scores):
    options = SelectionOptions(objective="mass", budget_fraction=0.5)
    with pytest.raises(InputError, match="give no budget"):
        frontier(scores, options)


def test_static_patterns_have_no_index():
    assert Work().index_cost((Dense(),), 4096).tolist() == [0.0]
