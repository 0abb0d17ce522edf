# SPDX-License-Identifier: Apache-2.0
"""From a layer's q and k and one candidate per head to a plan: the online index, as it runs."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np
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
from patternsearch.kernels.index import reference
from patternsearch.kernels.index.select import diagonals_of_offsets, select_top, thresholds
from patternsearch.kernels.index.upload import upload
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

DENSE_TILE = 128
"""Dense heads have no tile of their own; the larger one runs faster."""

BLOCK_SCORE_BYTES = 2**28
"""Tile scores held at a time; more query tiles and heads are scored in turns."""

Key = TypeVar("Key", bound=Hashable)


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
    sets = [*_implicit_sets(q.shape[2], candidates)]
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
        heads, sinks, windows = (tuple(column) for column in zip(*rows, strict=True))
        yield ImplicitSets(heads, tile, sinks, windows)


def _by(
    candidates: Sequence[Candidate], kind: type, *fields: str
) -> dict[tuple[object, ...], tuple[int, ...]]:
    """Group the heads of one kind by some of its parameters."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for head, candidate in enumerate(candidates):
        if isinstance(candidate, kind):
            groups[tuple(getattr(candidate, field) for field in fields)].append(head)
    return {key: tuple(heads) for key, heads in groups.items()}


class _Index:
    """The estimators of one backend, over some heads of one layer."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, backend: IndexBackend) -> None:
        self.q, self.k, self.scale, self.backend = q, k, scale, backend
        self.n, self.device = q.shape[2], q.device
        self.group = q.shape[1] // k.shape[1]

    def spread_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups = _by(candidates, VerticalSlashSpread, "tile", "last_q", "spread_rows")
        for (tile, last_q, spread_rows), heads in groups.items():
            column, diagonal = self._scores(
                "spread_scores", heads, last_q=last_q, spread_rows=spread_rows, tile=tile
            )
            mine = [candidates[head] for head in heads]
            budgets = [effective_diagonals(self.n, tile, c.diagonals) for c in mine]
            chosen = self._chosen(diagonal, budgets, FORCED_DIAGONALS)
            yield self._diagonal_sets(heads, tile, mine, column, chosen)

    def last_q_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups = _by(candidates, VerticalSlashLastQ, "tile", "last_q")
        for (tile, last_q), heads in groups.items():
            column, offset = self._scores("last_q_scores", heads, last_q=last_q)
            mine = [candidates[head] for head in heads]
            budgets = [effective_slash(self.n, c.slash) for c in mine]
            offsets = self._chosen(offset, budgets, FORCED_SLASHES)
            chosen = diagonals_of_offsets(offsets, tile)
            yield self._diagonal_sets(heads, tile, mine, column, chosen)

    def block_sets(self, candidates: Sequence[Candidate]) -> Iterator[Sets]:
        groups = _by(candidates, BlockSparse, "tile", "estimator")
        for (tile, estimator), heads in groups.items():
            count = num_tiles(self.n, tile)
            budgets = tuple(effective_blocks(self.n, tile, candidates[h].blocks) for h in heads)
            step = max(1, BLOCK_SCORE_BYTES // (4 * count * count))
            parts = [
                self._block_lists(heads[i : i + step], budgets[i : i + step], tile, estimator)
                for i in range(0, len(heads), step)
            ]
            yield ListedSets(heads, tile, torch.cat(parts), budgets)

    def _scores(self, name: str, heads: tuple[int, ...], **options: int) -> tuple[Tensor, ...]:
        if self.backend == "triton":
            from patternsearch.kernels.index import triton

            return getattr(triton, name)(self.q, self.k, scale=self.scale, heads=heads, **options)
        scores = [
            getattr(reference, name)(*self._one_head(head), scale=self.scale, **options)
            for head in heads
        ]
        return tuple(torch.cat(parts) for parts in zip(*scores, strict=True))

    def _one_head(self, head: int) -> tuple[Tensor, Tensor]:
        kv = head // self.group
        return self.q[:, head : head + 1], self.k[:, kv : kv + 1]

    def _chosen(self, scores: Tensor, budgets: Sequence[int], num_forced: int) -> Tensor:
        scores[:, :num_forced] = float("inf")
        limit = upload(np.asarray(budgets, dtype=np.int64), self.device)
        cut = thresholds(scores, limit, max(budgets))
        _, mask = select_top(scores, cut, limit, with_mask=True, triton=self._kernels)
        assert mask is not None
        return mask

    @property
    def _kernels(self) -> bool:
        return self.backend == "triton"

    def _diagonal_sets(
        self,
        heads: tuple[int, ...],
        tile: int,
        candidates: Sequence[Candidate],
        column: Tensor,
        chosen: Tensor,
    ) -> DiagonalSets:
        sizes = np.asarray([effective_vertical(self.n, c.vertical) for c in candidates])
        column[:, :FORCED_COLUMNS] = float("inf")
        limit = upload(sizes, self.device)
        columns, _ = select_top(
            column,
            thresholds(column, limit, int(sizes.max())),
            limit,
            starts=upload(np.cumsum(sizes) - sizes, self.device),
            out_size=int(sizes.sum()),
            triton=self._kernels,
        )
        assert columns is not None
        return DiagonalSets(heads, tile, chosen, columns, tuple(sizes.tolist()))

    def _block_lists(
        self, heads: tuple[int, ...], budgets: tuple[int, ...], tile: int, estimator: str
    ) -> Tensor:
        """List min(budget, u+1) key tiles, descending, of each head and query tile."""
        count = num_tiles(self.n, tile)
        step = max(1, min(count, BLOCK_SCORE_BYTES // (4 * count * len(heads))))
        sizes = np.asarray(budgets, dtype=np.int64)
        starts = (np.cumsum(sizes) - sizes) * count
        lists = torch.zeros(int(sizes.sum()) * count, dtype=torch.int32, device=self.device)
        for first in range(0, count, step):
            tiles = range(first, min(first + step, count))
            scores = self._block_scores(heads, tile, estimator, tiles)
            u = np.arange(tiles.start, tiles.stop, dtype=np.int64)
            at_u = torch.arange(tiles.start, tiles.stop, device=self.device)
            scores.diagonal(tiles.start, 1, 2).fill_(float("inf"))
            rows = (len(heads), len(tiles))
            limit_on_device = upload(sizes.repeat(len(tiles)), self.device)
            flat = scores.reshape(rows[0] * rows[1], count)
            select_top(
                flat,
                thresholds(flat, limit_on_device, max(budgets)),
                limit_on_device,
                lengths=(at_u + 1).int().repeat(len(heads)),
                starts=upload((starts[:, None] + u * sizes[:, None]).reshape(-1), self.device),
                out=lists,
                descending=True,
                triton=self._kernels,
            )
        return lists

    def _block_scores(
        self, heads: tuple[int, ...], tile: int, estimator: str, tiles: range
    ) -> Tensor:
        if self.backend == "triton":
            from patternsearch.kernels.index import triton

            return triton.block_scores(
                self.q, self.k, scale=self.scale, tile=tile, estimator=estimator,
                heads=heads, query_tiles=tiles,
            )  # fmt: skip
        scores = [
            reference.block_scores(
                *self._one_head(head), scale=self.scale, tile=tile, estimator=estimator
            )[:, tiles.start : tiles.stop]
            for head in heads
        ]
        return torch.cat(scores)
