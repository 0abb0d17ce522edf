# SPDX-License-Identifier: Apache-2.0
"""What ``bench`` measures: points that span every grid's budgets, and points that test the fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from patternsearch.errors import InputError, TimingError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    Tile,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import num_tiles
from patternsearch.timing.table import KERNEL_DTYPES

__all__ = ["FULL", "QUICK", "Case", "Plan", "between", "cases", "check_plan"]

_TILES: tuple[Tile, ...] = (64, 128)
_SINK = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """Which shapes are measured.

    Attributes:
        lengths: tokens; the time model is fitted to them.
        held_out_lengths: tokens between them; the time model is tested on them.
        head_dims: head sizes.
        dtype: torch name.
        num_query_heads: query heads in one launch, as in a real layer.
        num_kv_heads: kv heads in one launch.
        is_quick: fewer budgets.
    """

    lengths: tuple[int, ...]
    held_out_lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtype: str = "bfloat16"
    num_query_heads: int = 32
    num_kv_heads: int = 8
    is_quick: bool = False

    @property
    def num_index_kv_heads(self) -> int:
        """Kv heads of one index launch: a layer's heads run several patterns, each its own."""
        return max(1, self.num_kv_heads // 4)

    @property
    def num_index_query_heads(self) -> int:
        """Query heads of one index launch."""
        return self.num_index_kv_heads * (self.num_query_heads // self.num_kv_heads)


FULL = Plan(
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    held_out_lengths=(6144, 24576, 98304),
    head_dims=(64, 128),
)
QUICK = Plan(
    lengths=(4096, 16384, 65536),
    held_out_lengths=(32768,),
    head_dims=(128,),
    is_quick=True,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of one candidate that all heads of a layer run.

    Attributes:
        candidate: what the heads run; dense is measured once a dense backend.
        measures_index: time its index.
        measures_kernel: time its kernel.
        held_out: for testing the fit.
    """

    candidate: Candidate
    measures_index: bool
    measures_kernel: bool
    held_out: bool


def check_plan(plan: Plan) -> None:
    """Refuse a plan that no machine can measure.

    Raises:
        InputError: it is empty, or its heads do not divide.
        TimingError: no kernel takes its dtype.
    """
    if not plan.lengths or not plan.head_dims:
        raise InputError("nothing to measure: give at least one length and one head_dim")
    if plan.num_query_heads % plan.num_kv_heads:
        raise InputError(
            f"{plan.num_query_heads} query heads are not a multiple of {plan.num_kv_heads} kv "
            f"heads: give a multiple"
        )
    if plan.dtype not in KERNEL_DTYPES:
        raise TimingError(
            f"dtype {plan.dtype!r} is none that the kernels take: give "
            f"{', '.join(KERNEL_DTYPES[:-1])} or {KERNEL_DTYPES[-1]}"
        )


def between(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return held-out lengths for a fit on ascending lengths: the middle of every other gap."""
    gaps = [(low, high) for low, high in pairwise(lengths) if high > low + _TILES[-1]]
    middles = [(low + high) // 2 for low, high in gaps[::2]]
    return tuple(middle - middle % _TILES[0] for middle in middles)


def cases(num_tokens: int, plan: Plan) -> Iterator[Case]:
    """Yield the cases of one length.

    At a length of the fit, one-dimensional families get their whole range, Vertical-Slash a spread
    of column and diagonal budgets, indices a spread of sampled rows and budgets. Held-out cases
    lie between. At a held-out length every case is held out.
    """
    between = num_tokens in plan.held_out_lengths
    yield Case(Dense(), False, True, between)
    for tile in _TILES:
        fit = _testing(num_tokens, tile) if between else _fitting(num_tokens, tile, plan.is_quick)
        seen = set()
        for case in fit:
            if case.candidate not in seen:
                seen.add(case.candidate)
                yield Case(case.candidate, case.measures_index, case.measures_kernel, between)
        if not between:
            for case in _testing(num_tokens, tile):
                if case.candidate not in seen:
                    yield case


def _fitting(n: int, tile: Tile, is_quick: bool) -> Iterator[Case]:
    count = num_tiles(n, tile)
    windows = {512, 4096, n // 4, n} if is_quick else {256, 512, 1024, 4096, n // 4, n // 2, n}
    for window in sorted(w for w in windows if tile <= w <= n):
        yield Case(AShape(sink=_SINK, window=window, tile=tile), False, True, False)
    blocks = {8, 32, 128, count} if is_quick else {2, 8, 32, 64, 128, count // 2, count}
    for block in sorted(b for b in blocks if 1 <= b <= min(count, 1024)):
        indexed = block in (8, 32, 128) or block == count < 8
        yield Case(BlockSparse(blocks=block, tile=tile), indexed, True, False)
    # The longest lists stand for those that a short sequence cannot have.
    budgets = [b for b in ((100,) if is_quick else (8, 100)) if b <= count] or [count]
    for block in budgets:
        pooled = BlockSparse(blocks=block, tile=tile, estimator="pooled")
        yield Case(pooled, True, False, False)
    pairs = [(30, 2), (30, 64), (512, 8), (2048, 4), (2048, 64), (128, count // 2), (128, count)]
    if not is_quick:
        pairs += [(30, 16), (128, 4), (512, 32), (1024, 16), (2048, count // 2), (4096, 8)]
    for vertical, diagonals in pairs:
        if vertical <= n // 2 and 2 <= diagonals <= count:
            indexed = diagonals in (2, 4, 8)
            yield _stripes(vertical, diagonals, tile, indexed=indexed)
    for rows in ((16, 16), (256, 256)) if is_quick else ((16, 16), (16, 128), (256, 256)):
        if sum(rows) < n:
            yield _stripes(512, 8, tile, rows=rows, indexed=True, kernel=False)
    for last_q, vertical in ((64, 100), (64, 1000)) if is_quick else _LAST_Q:
        if vertical <= n // 2:
            sliced = VerticalSlashLastQ(vertical=vertical, slash=512, tile=tile, last_q=last_q)
            yield Case(sliced, True, False, False)


_LAST_Q = ((64, 100), (64, 1000), (256, 100))


def _testing(n: int, tile: Tile) -> Iterator[Case]:
    count = num_tiles(n, tile)
    yield Case(AShape(sink=_SINK, window=min(2048, n), tile=tile), False, True, True)
    for blocks in (16, 48):
        if blocks <= count:
            yield Case(BlockSparse(blocks=blocks, tile=tile), blocks == 16, True, True)
    for vertical, diagonals in ((64, 8), (256, 16), (1024, 32)):
        if vertical <= n // 2 and diagonals <= count:
            case = _stripes(vertical, diagonals, tile, indexed=vertical == 256)
            yield Case(case.candidate, case.measures_index, True, True)


def _stripes(
    vertical: int,
    diagonals: int,
    tile: Tile,
    *,
    rows: tuple[int, int] = (64, 64),
    indexed: bool,
    kernel: bool = True,
) -> Case:
    candidate = VerticalSlashSpread(
        vertical=vertical, diagonals=diagonals, tile=tile, last_q=rows[0], spread_rows=rows[1]
    )
    return Case(candidate, indexed, kernel, False)
