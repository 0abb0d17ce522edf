import numpy as np
import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.kernels._common.upload import column_spans
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
from support.attend import random_layer
from support.closeness import assert_close

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


@pytest.mark.parametrize("n", LENGTHS)
def test_spread_scores_of_several_tiles_match_reference(n):
    q, k, _ = random_layer(4, 2, n, 16, seed=n)
    options = {"scale": 0.25, "last_q": 64, "spread_rows": 64, "tiles": (128, 64)}
    columns, diagonals = triton.spread_scores_by_tile(q, k, **options)
    expected_columns, expected = reference.spread_scores_by_tile(q, k, **options)
    assert_close(columns, expected_columns, what="columns")
    assert diagonals.keys() == expected.keys()
    for tile, truth in expected.items():
        assert_close(diagonals[tile], truth, what=f"diagonals of tile {tile}")


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


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("n", [*LENGTHS, 321, 1345])
@pytest.mark.parametrize("long_tiles", [0, 128])
def test_block_scores_in_half_precision_match_reference(n, tile, head_dim, long_tiles, monkeypatch):
    """Half precision takes several key tiles at a time, a long prompt checks only its end."""
    monkeypatch.setattr(triton, "LONG_TILES", long_tiles)
    q, k, _ = random_layer(2, 1, n, head_dim, dtype=torch.float16, seed=n)
    options = {"scale": 0.1, "tile": tile, "estimator": "pooled_query"}
    expected = reference.block_scores(q, k, **options)
    got = triton.block_scores(q, k, **options)
    assert_close(got, expected, dtype=torch.float16)
    tail = range(num_tiles(n, tile) // 2, num_tiles(n, tile))
    some = triton.block_scores(q, k, query_tiles=tail, **options)
    assert_close(some, got[:, tail.start :], dtype=torch.float16)


def test_scores_of_some_heads_are_those_of_all():
    q, k, _ = random_layer(6, 2, 140, 80)
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


BACKENDS = pytest.mark.parametrize("lists", [select, select_triton], ids=["torch", "triton"])


@BACKENDS
@pytest.mark.parametrize("num_forced", [0, 1])
@pytest.mark.parametrize("entries", [1, 5, 130, 9000])
def test_select_top_breaks_ties_by_the_lower_index(entries, num_forced, lists):
    scores = _tied_scores(3, entries)
    budgets = (1, max(1, entries // 2), entries)
    out = torch.zeros(sum(budgets), dtype=torch.int32)
    mask = lists.select_top(
        scores[:, None].clone(), budgets, out=out, with_mask=True, num_forced=num_forced,
        causal_from=None,
    )  # fmt: skip
    order = reference.rank(scores, num_forced)
    expected = [row[:size].sort().values for row, size in zip(order, budgets, strict=True)]
    assert torch.equal(out.long(), torch.cat(expected))
    for row, entries_taken in zip(mask[:, 0], expected, strict=True):
        assert torch.equal(row.nonzero().squeeze(-1), entries_taken)


@BACKENDS
def test_select_top_orders_any_float(lists):
    values = [0.0, -0.0, 1e-40, -1e-40, 3.0, -3.0, float("inf"), float("-inf"), 2.0**-149, -7.5]
    scores = torch.tensor(values)[None]
    for budget in range(1, len(values) + 1):
        mask = lists.select_top(
            scores[:, None], (budget,), out=None, with_mask=True, num_forced=0, causal_from=None
        )  # fmt: skip
        expected = reference.rank(scores, 0)[0, :budget].sort().values
        assert torch.equal(mask[0, 0].nonzero().squeeze(-1), expected)


@BACKENDS
def test_select_top_lists_causal_entries_descending(lists):
    tiles, first, budgets = 6, 2, (3, 1)
    scores = torch.stack([_tied_scores(tiles, tiles), -_tied_scores(tiles, tiles)])
    scores.masked_fill_(torch.ones(tiles, tiles).triu(1).bool(), float("-inf"))
    out = torch.full((tiles * 4,), -1, dtype=torch.int32)
    lists.select_top(
        scores[:, first:].contiguous(), budgets, out=out, with_mask=False, num_forced=0,
        causal_from=first,
    )  # fmt: skip
    order = reference.rank_blocks(scores)
    for group, start in enumerate((0, 3 * tiles)):
        budget = budgets[group]
        for u in range(tiles):
            size = min(budget, u + 1)
            row = out[start + budget * u : start + budget * u + size].tolist()
            if u < first:
                assert set(row) == {-1}, "a row that was not asked for was written"
            else:
                assert row == sorted(order[group, u, :size].tolist(), reverse=True)


def test_select_top_reads_causal_rows_longer_than_a_block(monkeypatch):
    monkeypatch.setattr(select_triton, "LONG_ROW", 128)
    scores = _tied_scores(150, 150)[None, 147:].contiguous()
    lists = {}
    for module in (select, select_triton):
        lists[module] = torch.zeros(150 * 50, dtype=torch.int32)
        module.select_top(
            scores, (50,), out=lists[module], with_mask=False, num_forced=0, causal_from=147
        )
    assert torch.equal(lists[select], lists[select_triton])


@BACKENDS
@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("n", [1, 64, 65, 500, 5000])
def test_diagonals_of_offsets_match_geometry(n, tile, lists):
    generator = torch.Generator().manual_seed(n)
    offsets = torch.randperm(n, generator=generator)[:6]
    mask = torch.zeros(1, n, dtype=torch.uint8)
    mask[0, offsets] = 1
    got = lists.diagonals_of_offsets(mask, tile)[0].nonzero().squeeze(-1).numpy()
    expected = slash_diagonals(offsets.numpy(), tile)
    np.testing.assert_array_equal(got, expected[expected < num_tiles(n, tile)])


@BACKENDS
@pytest.mark.parametrize("count", [1, 7, 300])
def test_compact_diagonals_lists_and_counts(count, lists):
    generator = torch.Generator().manual_seed(count)
    chosen = (torch.rand(3, count, generator=generator) < 0.4).to(torch.uint8)
    listed, counts = lists.compact_diagonals(chosen)
    for head in range(3):
        expected = chosen[head].nonzero().squeeze(-1).tolist()
        assert listed[head, : len(expected)].tolist() == expected
        assert counts[head].tolist() == chosen[head].long().cumsum(0).tolist()


def test_loose_columns_kernel_matches_torch():
    tile, count = 64, 9
    generator = torch.Generator().manual_seed(1)
    chosen = (torch.rand(3, count, generator=generator) < 0.4).to(torch.uint8)
    chosen[:, 0] = 1
    sizes = (0, 150, 300)
    columns = [
        torch.randperm(tile * count, generator=generator)[:size].sort().values for size in sizes
    ]
    arguments = (torch.cat(columns).int(), sizes, chosen, tile)
    expected, expected_counts = select.loose_columns(*arguments)
    got, counts = select_triton.loose_columns(*arguments)
    assert torch.equal(counts, expected_counts)
    spans, size = column_spans(sizes, count, select.COLUMN_PADDING, torch.device("cpu"))
    assert len(got) == len(expected) == size
    for head, (_, _, start, stride) in enumerate(spans.T.tolist()):
        for u in range(count):
            row = slice(start + stride * u, start + stride * u + int(counts[head, u]))
            padded = slice(row.start, row.start + -(-int(counts[head, u]) // 128) * 128)
            own = columns[head]
            diagonal = u - own // tile
            keep = (diagonal > 0) & (chosen[head][diagonal.clamp(min=0)] == 0)
            assert got[row].tolist() == own[keep].tolist()
            assert torch.equal(got[padded], expected[padded])


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
