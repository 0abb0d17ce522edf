import numpy as np
import pytest
import torch
from support.attend import random_layer
from support.closeness import assert_close

from patternsearch.errors import InputError
from patternsearch.kernels.attend import build_plan
from patternsearch.kernels.attend.chunked import query_tile_keys
from patternsearch.kernels.index import reference, select, select_triton, triton
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import (
    FORCED_COLUMNS,
    FORCED_DIAGONALS,
    FORCED_SLASHES,
    a_shape_counts,
    block_sparse_counts,
    causal_pairs,
    effective_diagonals,
    effective_slash,
    effective_vertical,
    num_tiles,
    slash_diagonals,
)

LENGTHS = [1, 2, 63, 130, 300]


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("n", LENGTHS)
def test_spread_scores_match_reference(n, tile):
    q, k, _ = random_layer(4, 2, n, 16, seed=n)
    options = {"scale": 0.25, "last_q": 64, "spread_rows": 64, "tile": tile}
    expected = reference.spread_scores(q, k, **options)
    for got, truth, what in zip(
        triton.spread_scores(q, k, **options), expected, ("columns", "diagonals"), strict=True
    ):
        assert_close(got, truth, what=what)


def test_spread_scores_take_more_rows_than_one_block():
    q, k, _ = random_layer(2, 1, 400, 24)
    options = {"scale": 0.2, "last_q": 150, "spread_rows": 7, "tile": 64}
    expected = reference.spread_scores(q, k, **options)
    for got, truth in zip(triton.spread_scores(q, k, **options), expected, strict=True):
        assert_close(got, truth)


@pytest.mark.parametrize("n", LENGTHS)
def test_last_q_scores_match_reference(n, monkeypatch):
    monkeypatch.setattr(triton, "SCRATCH_BYTES", 4 * n * 128)  # one head at a time
    q, k, _ = random_layer(4, 2, n, 16, seed=n)
    expected = reference.last_q_scores(q, k, scale=0.25, last_q=64)
    got = triton.last_q_scores(q, k, scale=0.25, last_q=64)
    for values, truth, what in zip(got, expected, ("columns", "offsets"), strict=True):
        assert_close(values, truth, what=what)


@pytest.mark.parametrize("estimator", ["pooled_query", "pooled"])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("n", LENGTHS)
def test_block_scores_match_reference(n, tile, estimator):
    q, k, _ = random_layer(4, 2, n, 16, seed=n)
    options = {"scale": 0.25, "tile": tile, "estimator": estimator}
    expected = reference.block_scores(q, k, **options)
    assert_close(triton.block_scores(q, k, **options), expected)


def test_scores_of_some_heads_are_those_of_all():
    q, k, _ = random_layer(6, 2, 200, 80)
    heads = (5, 0, 3)
    for name, options in (
        ("spread_scores", {"last_q": 64, "spread_rows": 64, "tile": 64}),
        ("last_q_scores", {"last_q": 64}),
    ):
        some = getattr(triton, name)(q, k, scale=0.1, heads=heads, **options)
        every = getattr(triton, name)(q, k, scale=0.1, **options)
        for part, whole in zip(some, every, strict=True):
            assert torch.equal(part, whole[list(heads)])
    for estimator in ("pooled_query", "pooled"):
        options = {"scale": 0.1, "tile": 64, "estimator": estimator}
        some = triton.block_scores(q, k, heads=heads, query_tiles=range(1, 3), **options)
        every = triton.block_scores(q, k, **options)
        assert_close(some, every[list(heads), 1:3])


def _tied_scores(rows, entries):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, (rows, entries), generator=generator).float()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("entries", [1, 5, 130, 4500])
def test_select_top_breaks_ties_by_the_lower_index(entries, on_device):
    scores = _tied_scores(3, entries)
    budgets = torch.tensor([1, max(1, entries // 2), entries])
    cuts = select.thresholds(scores, budgets, entries)
    out, mask = select.select_top(
        scores, cuts, budgets,
        starts=budgets.cumsum(0) - budgets, out_size=int(budgets.sum()), with_mask=True,
        triton=on_device,
    )  # fmt: skip
    order = reference.rank(scores, 0)
    expected = [row[:size].sort().values for row, size in zip(order, budgets, strict=True)]
    assert torch.equal(out.long(), torch.cat(expected))
    for row, entries_taken in zip(mask, expected, strict=True):
        assert torch.equal(row.nonzero().squeeze(-1), entries_taken)


@pytest.mark.parametrize("on_device", [False, True])
def test_select_top_lists_causal_entries_descending(on_device):
    scores = _tied_scores(6, 6)
    scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    budgets = torch.full((6,), 3)
    out, _ = select.select_top(
        scores, select.thresholds(scores, budgets, 3), budgets,
        lengths=torch.arange(1, 7, dtype=torch.int32), starts=torch.arange(6) * 3, out_size=18,
        descending=True, triton=on_device,
    )  # fmt: skip
    order = reference.rank(scores, 0)
    for u in range(6):
        size = min(3, u + 1)
        expected = sorted(order[u, :size].tolist(), reverse=True)
        assert out[3 * u : 3 * u + size].tolist() == expected


@pytest.mark.parametrize("tile", [64, 128])
def test_diagonals_of_offsets_match_geometry(tile):
    n = 500
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randperm(n, generator=generator)[:6]
    mask = torch.zeros(1, n, dtype=torch.uint8)
    mask[0, offsets] = 1
    got = select.diagonals_of_offsets(mask, tile)[0].nonzero().squeeze(-1).numpy()
    expected = slash_diagonals(offsets.numpy(), tile)
    np.testing.assert_array_equal(got, expected[expected < num_tiles(n, tile)])


def test_loose_columns_kernel_matches_torch():
    tile, count = 64, 9
    generator = torch.Generator().manual_seed(1)
    chosen = (torch.rand(3, count, generator=generator) < 0.4).to(torch.uint8)
    chosen[:, 0] = 1
    sizes = (0, 150, 300)
    columns = [
        torch.randperm(tile * count, generator=generator)[:size].sort().values for size in sizes
    ]
    stride = torch.tensor([0, 256, 384])
    arguments = (torch.cat(columns).int(), sizes, chosen)
    options = {
        "tile": tile,
        "out_start": torch.tensor([0, 0, 256 * count]),
        "out_stride": stride,
        "out_size": int(stride.sum()) * count,
    }
    expected, expected_counts = select.loose_columns(*arguments, **options)
    got, counts = select_triton.loose_columns(*arguments, **options)
    assert torch.equal(counts, expected_counts)
    for head in (1, 2):
        for u in range(count):
            start = int(options["out_start"][head] + stride[head] * u)
            filled = -(-int(counts[head, u]) // select.COLUMN_PADDING) * select.COLUMN_PADDING
            assert torch.equal(got[start : start + filled], expected[start : start + filled])


CANDIDATES = [
    Dense(),
    AShape(sink=70, window=65, tile=64),
    AShape(sink=1, window=200, tile=128),
    VerticalSlashSpread(vertical=40, diagonals=3, tile=64),
    VerticalSlashSpread(vertical=60, diagonals=2, tile=128),
    VerticalSlashLastQ(vertical=35, slash=110, tile=64),
    BlockSparse(blocks=2, tile=64),
    BlockSparse(blocks=3, tile=64, estimator="pooled"),
]


def _keys_by_definition(candidate, q, k, scale, u, n):
    """Return the keys of one query tile, from scores ranked by the reference."""
    tile = getattr(candidate, "tile", 128)
    v = torch.arange(n) // tile
    below = torch.arange(n) < (u + 1) * tile
    if isinstance(candidate, Dense):
        keep = below
    elif isinstance(candidate, AShape):
        near = (tile * (u - v) - (tile - 1)).clamp(min=0) < candidate.window
        keep = below & (near | (tile * v < candidate.sink))
    elif isinstance(candidate, BlockSparse):
        scores = reference.block_scores(q, k, scale=scale, tile=tile, estimator=candidate.estimator)
        best = reference.rank_blocks(scores)[0, u, : min(candidate.blocks, u + 1)]
        keep = below & torch.isin(v, best)
    else:
        if isinstance(candidate, VerticalSlashSpread):
            column, diagonal = reference.spread_scores(
                q, k, scale=scale, last_q=64, spread_rows=64, tile=tile
            )
            budget = effective_diagonals(n, tile, candidate.diagonals)
            chosen = reference.rank(diagonal, FORCED_DIAGONALS)[0, :budget]
        else:
            column, offset = reference.last_q_scores(q, k, scale=scale, last_q=64)
            budget = effective_slash(n, candidate.slash)
            offsets = reference.rank(offset, FORCED_SLASHES)[0, :budget]
            chosen = torch.from_numpy(slash_diagonals(offsets.numpy(), tile))
        columns = reference.rank(column, FORCED_COLUMNS)[
            0, : effective_vertical(n, candidate.vertical)
        ]
        keep = below & (torch.isin(u - v, chosen) | torch.isin(torch.arange(n), columns))
    return keep.nonzero().squeeze(-1)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("n", [1, 64, 700])
def test_build_plan_reads_exactly_the_physical_sets(n, backend):
    q, k, _ = random_layer(8, 2, n, 16, seed=3, magnitude=2.0)
    plan = build_plan(q, k, scale=0.25, candidates=CANDIDATES, backend=backend)
    seen = []
    for part in plan.tile_plans:
        for row, head in enumerate(part.heads):
            seen.append(head)
            for u in range(num_tiles(n, part.tile)):
                keys = query_tile_keys(part, row, u, n)
                assert len(set(keys.tolist())) == len(keys), "a pair is read twice"
                expected = _keys_by_definition(
                    CANDIDATES[head], q[:, head : head + 1], k[:, head // 4 : head // 4 + 1],
                    0.25, u, n,
                )  # fmt: skip
                assert keys.sort().values.tolist() == expected.tolist(), (head, u)
    assert sorted(seen) == list(range(8))


def test_plan_counts_match_geometry():
    n = 700
    q, k, _ = random_layer(8, 2, n, 16, seed=3)
    counts = build_plan(q, k, scale=0.25, candidates=CANDIDATES, backend="torch").counts()
    for head, candidate in enumerate(CANDIDATES):
        if isinstance(candidate, AShape):
            expected = a_shape_counts(n, candidate.tile, candidate.sink, candidate.window)
        elif isinstance(candidate, BlockSparse):
            expected = block_sparse_counts(n, candidate.tile, candidate.blocks)
        else:
            continue
        assert (int(counts.tiles[head]), int(counts.pairs[head])) == expected
        assert int(counts.columns[head]) == 0
    assert counts.density[0] == 1.0
    assert int(counts.pairs[0]) == causal_pairs(n)


def test_build_plan_refuses_a_missing_head():
    q, k, _ = random_layer(4, 2, 64, 16)
    with pytest.raises(InputError, match="3 candidates"):
        build_plan(q, k, scale=0.25, candidates=[Dense()] * 3)
