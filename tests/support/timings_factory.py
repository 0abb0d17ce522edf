"""Timing tables of a made-up GPU whose times follow a formula, with or without noise."""

import numpy as np

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import num_tiles
from patternsearch.timing.cases import Plan, cases
from patternsearch.timing.model import held_out_errors
from patternsearch.timing.table import TimingRow, kernel_digest, sealed
from support.scores_factory import counts

SMALL_PLAN = Plan(
    lengths=(1024, 2048, 4096, 8192, 16384),
    held_out_lengths=(3072, 12288),
    head_dims=(128,),
    num_query_heads=8,
    num_kv_heads=2,
)


def dense_ms(n):
    """One head: a full GPU at long n, a floor where it is empty."""
    return 0.004 + n**2 / 1.6e10


def kernel_ms(candidate, n, tiles, columns):
    """One head: query tiles start up, tiles and columns cost by their size."""
    query_tiles = num_tiles(n, candidate.tile)
    rate = 1.3 if candidate.tile == 64 else 1.0
    pairs = tiles * candidate.tile**2 * rate + 2.5 * columns * candidate.tile
    return 0.006 + query_tiles * 2e-5 + pairs / 1.1e10 * 2


def index_ms(candidate, n):
    match candidate:
        case Dense() | AShape():
            return 0.0
        case VerticalSlashSpread():
            return 0.003 + n * (candidate.last_q + candidate.spread_rows + 20) / 8e9
        case VerticalSlashLastQ():
            return 0.003 + n * (candidate.last_q + 20) / 8e9
        case BlockSparse():
            share = 64 if candidate.estimator == "pooled_query" else 4
            return 0.003 + n * (share * n / 4096 + candidate.blocks) / 8e9


def timing_rows(plan=SMALL_PLAN, noise=0.0, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    rows = {}

    def add(op, n, head_ms, held_out, **values):
        p50 = head_ms * plan.num_query_heads * float(np.exp(rng.normal(0, noise)))
        empty = {"backend": "triton", "tile": None, "rows": None, "budget": None,
                 "tiles": None, "columns": None}  # fmt: skip
        for head_dim in plan.head_dims:
            row = {
                **empty, "op": op, "dtype": dtype, "head_dim": head_dim, "num_tokens": n,
                "num_query_heads": plan.num_query_heads, "num_kv_heads": plan.num_kv_heads,
                "held_out": held_out, "repetitions": 9,
                "p20_ms": round(p50 * 0.98, 6), "p50_ms": round(p50, 6),
                "p80_ms": round(p50 * 1.05, 6), **values,
            }  # fmt: skip
            measured = TimingRow.model_validate(row)
            rows.setdefault(measured.identity(), measured)

    for n in sorted(plan.lengths + plan.held_out_lengths):
        for case in cases(n, plan):
            candidate = case.candidate
            if candidate == Dense():
                add("dense", n, dense_ms(n), case.held_out, backend="sdpa_cudnn")
                add("dense", n, 1.2 * dense_ms(n), case.held_out, backend="sdpa_flash")
                continue
            tiles, columns, _ = counts(candidate, n)
            if case.measures_kernel:
                add(f"attend_{candidate.kind}", n, kernel_ms(candidate, n, tiles, columns),
                    case.held_out, tile=candidate.tile, tiles=tiles, columns=columns)  # fmt: skip
            if case.measures_index:
                sampled = getattr(candidate, "last_q", 0) + getattr(candidate, "spread_rows", 0)
                budget = getattr(candidate, "vertical", None) or candidate.blocks
                name = candidate.estimator
                add(f"index_{name}", n, index_ms(candidate, n), case.held_out,
                    tile=candidate.tile, rows=sampled or None, budget=budget)  # fmt: skip
    return tuple(rows.values())


def with_flash4(rows, times=0.5, start_ms=0.0):
    """Add what FlashAttention-4 would take on the same plans, a head: `times` ours, and a start."""
    added = []
    for row in rows:
        if row.op in ("attend_a_shape", "attend_block_sparse") and row.tile == 128:
            p50 = round(row.p50_ms * times + start_ms * row.num_query_heads, 6)
            values = {"p20_ms": p50, "p50_ms": p50, "p80_ms": p50, "backend": "flash4"}
            added.append(row.model_copy(update=values))
    return (*rows, *added)


def timing_table(rows=None, **changes):
    parts = {
        "device": "Made-up GPU",
        "compute_capability": "9.0",
        "driver": None,
        "clocks": {"sm_mhz_min": None, "sm_mhz_max": None, "memory_mhz": None},
        "versions": {"torch": "2.13.0"},
        "kernel_sha256": kernel_digest(),
        "is_quick": False,
        "settings": (),
        "rows": rows if rows is not None else timing_rows(),
        "skipped": (),
        "errors": (),
        **changes,
    }
    return sealed(**{**parts, "errors": held_out_errors(sealed(**parts))})
