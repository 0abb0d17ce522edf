# SPDX-License-Identifier: Apache-2.0
"""From a layer's q and k and one candidate per head to a plan: the online index, as it runs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels.attend.plan import (
    AttendPlan,
    DiagonalSets,
    ImplicitSets,
    ListedSets,
    Sets,
    make_plan,
)
from patternsearch.kernels.index import reference, select
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.patterns.geometry import (
    FORCED_COLUMNS,
    FORCED_DIAGONALS,
    FORCED_SLASHES,
    a_shape_sink_tiles,
    a_shape_window_diagonals,
    effective_blocks,
    effective_diagonals,
    effective_slash,
    effective_vertical,
    num_tiles,
)

__all__ = ["IndexBackend", "build_plan"]

IndexBackend = Literal["triton", "torch"]
BlockEstimator = Literal["pooled_query", "pooled"]

DENSE_TILE = 128
"""Dense heads have no tile of their own; the larger one runs faster."""

BLOCK_SCORE_BYTES = 2**28
"""Tile scores held at a time; more query tiles and heads are scored in turns."""


def build_plan(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    candidates: Sequence[Candidate],
    backend: IndexBackend = "triton",
) -> AttendPlan:
    """Compute the online index of every head and list what each query tile reads.

    On CUDA nothing here waits for the device.

    Args:
        q: [1, Hq, n, d].
        k: [1, Hkv, n, d].
        scale: positive factor of the logits.
        candidates: what each query head runs, Hq of them.
        backend: ``triton``, or ``torch``, slow, on any device.

    Raises:
        InputError: there are not Hq candidates, the backend is unknown, or a tensor is not as
            above.
        EnvironmentLacks: ``triton`` without a CUDA device.
    """
    if q.ndim != 4 or len(candidates) != q.shape[1]:
        raise InputError(
            f"{len(candidates)} candidates for q of shape {tuple(q.shape)}; q must be "
            "[1, Hq, n, d] and every head needs one candidate"
        )
    if backend not in ("triton", "torch"):
        raise InputError(f"unknown index backend {backend!r}; choose triton or torch")
    index = _Index(q, k, scale, backend)
    sets: list[Sets] = [*_implicit_sets(q.shape[2], candidates)]
    sets += index.spread_sets(candidates)
    sets += index.last_q_sets(candidates)
    sets += index.block_sets(candidates)
    return make_plan(q.shape[2], q.shape[1], sets, device=q.device)


def _implicit_sets(n: int, candidates: Sequence[Candidate]) -> Iterator[ImplicitSets]:
    by_tile: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for head, candidate in enumerate(candidates):
        if isinstance(candidate, Dense):
            by_tile[DENSE_TILE].append((head, 0, num_tiles(n, DENSE_TILE)))
        elif isinstance(candidate, AShape):
            sinks = a_shape_sink_tiles(n, candidate.tile, candidate.sink)
            windows = a_shape_window_diagonals(n, candidate.tile, candidate.window)
            by_tile[candidate.tile].append((head, sinks, windows))
    for tile, rows in by_tile.items():
        heads, all_sinks, all_windows = zip(*rows, strict=True)
        yield ImplicitSets(heads, tile, all_sinks, all_windows)


class _Index:
    """The estimators of one backend, over some heads of one layer."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, backend: IndexBackend) -> None:
        self.q, self.k, self.scale = q, k, scale
        self.n, self.device = q.shape[2], q.device
        self.scores: Any = _ReferenceScores(q, k)
        self.lists: Any = select
        if backend == "triton":
            from patternsearch.kernels.index import select_triton, triton

            self.scores = _TritonScores(q, k, triton)
            self.lists = select_triton

    def spread_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups: dict[tuple[int, int, int], dict[int, VerticalSlashSpread]] = defaultdict(dict)
        for head, c in enumerate(candidates):
            if isinstance(c, VerticalSlashSpread):
                groups[c.tile, c.last_q, c.spread_rows][head] = c
        for (tile, last_q, spread_rows), mine in groups.items():
            column, diagonal = self.scores(
                "spread_scores", tuple(mine), scale=self.scale, last_q=last_q,
                spread_rows=spread_rows, tile=tile,
            )  # fmt: skip
            budgets = [effective_diagonals(self.n, tile, c.diagonals) for c in mine.values()]
            chosen = self._chosen(diagonal, budgets, FORCED_DIAGONALS)
            yield self._diagonal_sets(tile, mine, column, chosen)

    def last_q_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups: dict[tuple[int, int], dict[int, VerticalSlashLastQ]] = defaultdict(dict)
        for head, c in enumerate(candidates):
            if isinstance(c, VerticalSlashLastQ):
                groups[c.tile, c.last_q][head] = c
        for (tile, last_q), mine in groups.items():
            column, offset = self.scores(
                "last_q_scores", tuple(mine), scale=self.scale, last_q=last_q
            )
            budgets = [effective_slash(self.n, c.slash) for c in mine.values()]
            offsets = self._chosen(offset, budgets, FORCED_SLASHES)
            chosen = self.lists.diagonals_of_offsets(offsets, tile)
            yield self._diagonal_sets(tile, mine, column, chosen)

    def block_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups: dict[tuple[int, BlockEstimator], dict[int, int]] = defaultdict(dict)
        for head, c in enumerate(candidates):
            if isinstance(c, BlockSparse):
                groups[c.tile, c.estimator][head] = effective_blocks(self.n, c.tile, c.blocks)
        for (tile, estimator), mine in groups.items():
            heads, budgets = tuple(mine), tuple(mine.values())
            step = max(1, BLOCK_SCORE_BYTES // (4 * num_tiles(self.n, tile) ** 2))
            parts = [
                self._block_lists(heads[i : i + step], budgets[i : i + step], tile, estimator)
                for i in range(0, len(heads), step)
            ]
            tiles = torch.cat(parts) if len(parts) > 1 else parts[0]
            yield ListedSets(heads, tile, tiles, budgets)

    def _chosen(self, scores: Tensor, budgets: Sequence[int], num_forced: int) -> Tensor:
        mask = self.lists.select_top(
            scores[:, None], tuple(budgets), out=None, with_mask=True, num_forced=num_forced,
            causal_from=None,
        )  # fmt: skip
        chosen: Tensor = mask[:, 0]
        return chosen

    def _diagonal_sets(
        self,
        tile: int,
        candidates: Mapping[int, VerticalSlashSpread | VerticalSlashLastQ],
        column: Tensor,
        chosen: Tensor,
    ) -> DiagonalSets:
        sizes = tuple(effective_vertical(self.n, c.vertical) for c in candidates.values())
        columns = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        self.lists.select_top(
            column[:, None], sizes, out=columns, with_mask=False, num_forced=FORCED_COLUMNS,
            causal_from=None,
        )  # fmt: skip
        return DiagonalSets(tuple(candidates), tile, chosen, columns, sizes)

    def _block_lists(
        self, heads: tuple[int, ...], budgets: tuple[int, ...], tile: int,
        estimator: BlockEstimator,
    ) -> Tensor:  # fmt: skip
        """List min(budget, u+1) key tiles, descending, of each head and query tile."""
        count = num_tiles(self.n, tile)
        step = max(1, min(count, BLOCK_SCORE_BYTES // (4 * count * len(heads))))
        lists = torch.empty(sum(budgets) * count, dtype=torch.int32, device=self.device)
        for first in range(0, count, step):
            scores = self.scores(
                "block_scores", heads, scale=self.scale, tile=tile, estimator=estimator,
                query_tiles=range(first, min(first + step, count)), fill_above=False,
            )  # fmt: skip
            self.lists.select_top(
                scores, budgets, out=lists, with_mask=False, num_forced=0, causal_from=first
            )  # fmt: skip
        return lists


class _TritonScores:
    """The Triton estimators of some heads at once."""

    def __init__(self, q: Tensor, k: Tensor, functions: ModuleType) -> None:
        self.q, self.k, self.functions = q, k, functions

    def __call__(self, name: str, heads: tuple[int, ...], **options: Any) -> Any:
        return getattr(self.functions, name)(self.q, self.k, heads=heads, **options)


class _ReferenceScores:
    """The PyTorch estimators, head by head, so that no copy of some heads is needed."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k, self.group = q, k, q.shape[1] // k.shape[1]

    def __call__(
        self,
        name: str,
        heads: tuple[int, ...],
        query_tiles: range | None = None,
        fill_above: bool = True,
        **options: Any,
    ) -> Any:
        results = []
        for head in heads:
            kv = head // self.group
            q, k = self.q[:, head : head + 1], self.k[:, kv : kv + 1]
            results.append(getattr(reference, name)(q, k, **options))
        if query_tiles is not None:
            return torch.cat(results)[:, query_tiles.start : query_tiles.stop].contiguous()
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
