# SPDX-License-Identifier: Apache-2.0
"""Scores all candidates of a grid on the q and k of one layer, in one pass over the pairs.

Online ranks come first, since they decide the buckets that the pass reduces under. Oracle ranks
need sums over the whole matrix: one more pass, behind an option.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.score import ScoreMasses, score_masses_chunked
from patternsearch.kernels.score.sampled import near_masses
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    Index,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.patterns.consumers import MINFERENCE_TILE, Consumer
from patternsearch.patterns.geometry import NUM_REGIONS, effective_blocks, num_tiles
from patternsearch.patterns.row_sampling import sample_rows
from patternsearch.scoring.accounts import Accounts, LayerScores, joined_heads
from patternsearch.scoring.online_index import OnlineIndex
from patternsearch.scoring.regions import SampledRegions, SampleTables
from patternsearch.scoring.sampled_rows import sampled_in_torch, sampled_on_cuda
from patternsearch.scoring.tile_sets import (
    TileMasses,
    put_a_shape,
    put_block_sparse,
    put_dense,
)
from patternsearch.scoring.vertical_slash import ColumnRanks, VerticalSlashIndex, prepare

__all__ = ["LayerScorer", "LayerScores"]

_DRAWS = 8
"""Samples of rows that the layers take in turn: laying one out costs the host more than a layer's
launches."""
_TILE_PAIRS = 2**28
"""Largest number of tiles, over all heads, whose masses are held at a time (1 GiB)."""


def _kv_blocks(num_kv_heads: int, group: int, n: int) -> Iterator[slice]:
    """Yield kv heads whose query heads are scored together; all of them unless n is very long."""
    step = max(1, _TILE_PAIRS // (group * num_tiles(n, 64) ** 2))
    for first in range(0, num_kv_heads, step):
        yield slice(first, min(first + step, num_kv_heads))


@dataclass
class _Rows:
    """Candidates of one kind that share an index, with their places."""

    candidates: list[Any] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def add(self, candidate: Candidate, row: int) -> None:
        self.candidates.append(candidate)
        self.rows.append(row)


class LayerScorer:
    """Scores a fixed list of candidates on any number of layers.

    Args:
        candidates: distinct candidates; their order is the order of the rows.
        oracle: also score every dynamic candidate with the oracle index.
        consumer: whose kernels will run ``last_q`` candidates, which decides their physical set:
            tile diagonals for ``patternsearch``; for each offset the 64 keys that a query tile of
            64 reads, for ``minference``, ``vllm`` and ``sglang``. The last two run a ``vertical``
            of 30 as 130, and are scored so. Other candidates do not depend on it.
        backend: ``torch`` runs anywhere; ``triton`` needs CUDA tensors and their ``lse``.
        row_sample: fraction of the query rows that are scored, in (0, 1]. Below 1 masses are
            unbiased estimates with standard errors, and logical masses that need single elements
            are not computed.
        row_seed: of the choice of rows.

    Raises:
        InputError: a candidate cannot run on the consumer's kernels, or the oracle index is asked
            for of a sample of rows.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        oracle: bool = False,
        consumer: Consumer = "patternsearch",
        backend: Literal["torch", "triton"] = "torch",
        row_sample: float = 1.0,
        row_seed: int = 0,
    ) -> None:
        if oracle and row_sample < 1.0:
            raise InputError(
                f"the oracle index needs every row, not {row_sample:g} of them: score all rows, or "
                "leave the oracle out"
            )
        self.row_sample = row_sample
        self.row_seed = row_seed
        self._samples: dict[tuple[int, int, torch.device], SampleTables] = {}
        self.oracle = oracle
        self.consumer: Consumer = consumer
        self.backend = backend
        specs: list[tuple[Candidate, Index]] = []
        self._dense: list[int] = []
        self._a_shape = _Rows()
        self._blocks: dict[tuple[str | None, int], _Rows] = {}
        self._spread: dict[tuple[int, int, int] | int, _Rows] = {}
        self._last_q: dict[tuple[int, int] | int, _Rows] = {}
        for candidate in candidates:
            self._check(candidate)
            for index in self._indices(candidate):
                self._place(candidate, index, len(specs))
                specs.append((candidate, index))
        self.specs: tuple[tuple[Candidate, Index], ...] = tuple(specs)

    def _check(self, candidate: Candidate) -> None:
        if (
            self.consumer != "patternsearch"
            and isinstance(candidate, VerticalSlashLastQ)
            and candidate.tile != MINFERENCE_TILE
        ):
            raise InputError(
                f"{describe(candidate)}: the kernels of {self.consumer} have query tiles of 64: "
                "give estimator last_q the tile 64 in the grid, or score for patternsearch"
            )

    def _indices(self, candidate: Candidate) -> tuple[Index, ...]:
        if isinstance(candidate, Dense | AShape):
            return ("none",)
        return ("online", "oracle") if self.oracle else ("online",)

    def _place(self, candidate: Candidate, index: Index, row: int) -> None:
        online = index == "online"
        if isinstance(candidate, Dense):
            self._dense.append(row)
        elif isinstance(candidate, AShape):
            self._a_shape.add(candidate, row)
        elif isinstance(candidate, BlockSparse):
            key = (candidate.estimator if online else None, candidate.tile)
            self._blocks.setdefault(key, _Rows()).add(candidate, row)
        elif isinstance(candidate, VerticalSlashSpread):
            sampled = (candidate.last_q, candidate.spread_rows, candidate.tile)
            self._spread.setdefault(sampled if online else candidate.tile, _Rows()).add(
                candidate, row
            )
        else:
            last = (candidate.last_q, candidate.tile)
            self._last_q.setdefault(last if online else candidate.tile, _Rows()).add(candidate, row)

    @torch.no_grad()
    def score(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        lse: Tensor | None = None,
        layer: int | None = None,
    ) -> LayerScores:
        """Score every head of one layer.

        Args:
            q: [1, Hq, n, d] after positions are applied, floating, any strides.
            k: [1, Hkv, n, d], not repeated.
            scale: factor of the logits.
            lse: float32 [Hq, n], natural log-sum-exp of the rows of the dense attention; needed
                by the backend ``triton``. If None, ``torch`` computes it of the rows it scores,
                and a sample's estimates are less precise.
            layer: named in errors.

        Raises:
            ModelError: q and k give probabilities that are not finite; names layer and head.
        """
        group = q.shape[1] // k.shape[1]
        parts = [
            self._score_heads(
                q[:, kv.start * group : kv.stop * group],
                k[:, kv],
                scale=scale,
                lse=None if lse is None else lse[kv.start * group : kv.stop * group],
                layer=layer,
                first_head=kv.start * group,
            )
            for kv in _kv_blocks(k.shape[1], group, q.shape[2])
        ]
        return joined_heads(parts)

    def _score_heads(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        lse: Tensor | None,
        layer: int | None,
        first_head: int,
    ) -> LayerScores:
        n = q.shape[2]
        sample = None
        if self.row_sample < 1.0:
            sample = self._sample(n, layer or 0, q.device)
        accounts = Accounts(
            q.shape[1],
            len(self.specs),
            n,
            q.device,
            sample=None if sample is None else sample.sample,
            first_head=first_head,
        )
        index = OnlineIndex(q, k, scale=scale, backend=self.backend)
        # First, since this takes a GPU long and the host shortly, which so gets ahead of it.
        orders = self._block_orders(index, n)
        oracle_masses = self._oracle_pass(q, k, scale, lse)
        slashes = self._slash_indices(index, n, oracle_masses)
        if sample is None:
            tile_masses, logical = self._put_exact(accounts, slashes, q, k, scale, lse)
        else:
            tile_masses, logical = self._put_sampled(accounts, slashes, q, k, scale, lse, sample)
        for row in self._dense:
            put_dense(accounts, tile_masses, row)
        if self._a_shape.rows:
            put_a_shape(
                accounts, tile_masses, self._a_shape.rows, self._a_shape.candidates, logical
            )
        for block_key, blocks in self._blocks.items():
            put_block_sparse(
                accounts, tile_masses, blocks.rows, blocks.candidates, orders.get(block_key)
            )
        total = tile_masses.regions.sum(tile_masses.segment_mass.sum(2)[:, None])
        return accounts.finish(self.specs, total[:, 0, :NUM_REGIONS].sum(-1), layer)

    def _sample(self, n: int, layer: int, device: torch.device) -> SampleTables:
        """Return the sample of rows that a layer is scored on; texts of one length follow."""
        key = (n, layer % _DRAWS, device)
        if any(other[0] != n for other in self._samples):
            self._samples.clear()
        if key not in self._samples:
            sample = sample_rows(n, self.row_sample, self.row_seed, layer % _DRAWS)
            self._samples[key] = SampleTables(sample, device)
        return self._samples[key]

    def _put_exact(
        self,
        accounts: Accounts,
        slashes: Sequence[VerticalSlashIndex],
        q: Tensor,
        k: Tensor,
        scale: float,
        lse: Tensor | None,
    ) -> tuple[TileMasses, Tensor | None]:
        """Score all rows; enter Vertical-Slash, return tile masses and A-shape's logical masses."""
        sinks = sorted({candidate.sink for candidate in self._a_shape.candidates})
        windows = sorted({candidate.window for candidate in self._a_shape.candidates})
        masses = self._score_masses(
            q,
            k,
            scale=scale,
            lse=lse,
            tables=[table for index in slashes for table in index.tables],
            a_shape_sinks=sinks,
            a_shape_windows=windows,
        )
        column_mass = list(masses.column_mass)
        for index in slashes:
            index.put(accounts, [column_mass.pop(0) for _ in index.tables])
        logical = None
        if masses.a_shape_logical is not None:
            places = [
                sinks.index(candidate.sink) * len(windows) + windows.index(candidate.window)
                for candidate in self._a_shape.candidates
            ]
            logical = masses.a_shape_logical.flatten(1)[:, upload(np.asarray(places), q.device)]
        return TileMasses(masses.segment_mass, accounts.n), logical

    def _put_sampled(
        self,
        accounts: Accounts,
        slashes: Sequence[VerticalSlashIndex],
        q: Tensor,
        k: Tensor,
        scale: float,
        lse: Tensor | None,
        sample: SampleTables,
    ) -> tuple[TileMasses, None]:
        """Score the rows of a sample; enter Vertical-Slash and return the masses of tiles."""
        measure = sampled_on_cuda if self.backend == "triton" else sampled_in_torch
        unit_mass, missed = measure(slashes, q, k, scale=scale, lse=lse, sample=sample.sample)
        known = None
        if lse is not None:
            known = near_masses(q, k, scale=scale, lse=lse, backend=self.backend)
        regions = SampledRegions(sample, known)
        for index, total in zip(slashes, missed, strict=True):
            index.put_sampled(accounts, total, regions)
        return TileMasses(unit_mass, accounts.n, regions), None

    def _block_orders(self, index: OnlineIndex, n: int) -> dict[tuple[str | None, int], Tensor]:
        """Rank the key tiles of every online Block-Sparse index."""
        return {
            (estimator, tile): index.ranked_tiles(
                estimator,
                tile,
                max(effective_blocks(n, tile, one.blocks) for one in group.candidates),
            )
            for (estimator, tile), group in self._blocks.items()
            if estimator is not None
        }

    def _oracle_pass(
        self, q: Tensor, k: Tensor, scale: float, lse: Tensor | None
    ) -> ScoreMasses | None:
        if not (self.oracle and (self._spread or self._last_q)):
            return None
        return self._score_masses(
            q, k, scale=scale, lse=lse, column_sums=True, offset_sums=bool(self._last_q)
        )

    def _slash_indices(
        self, index: OnlineIndex, n: int, oracle: ScoreMasses | None
    ) -> list[VerticalSlashIndex]:
        """Rank every Vertical-Slash index, online and oracle."""
        indices, ranks = [], ColumnRanks()
        online = index.spread_scores([key for key in self._spread if isinstance(key, tuple)])
        for key, group in self._spread.items():
            if isinstance(key, tuple):
                columns, diagonals = online[key]
            else:
                assert oracle is not None
                assert oracle.column_sum is not None
                columns = oracle.column_sum
                diagonals = TileMasses(oracle.segment_mass, n).diagonal_sums(key)
            indices.append(
                prepare(group.candidates, group.rows, columns, diagonals, self.consumer, ranks)
            )
        for last_key, group in self._last_q.items():
            if isinstance(last_key, tuple):
                columns, offsets = index.last_q_scores(last_key[0])
            else:
                assert oracle is not None
                assert oracle.column_sum is not None
                assert oracle.offset_sum is not None
                columns, offsets = oracle.column_sum, oracle.offset_sum
            indices.append(
                prepare(group.candidates, group.rows, columns, offsets, self.consumer, ranks)
            )
        return indices

    def _score_masses(self, q: Tensor, k: Tensor, **arguments: Any) -> ScoreMasses:
        if self.backend == "torch":
            return score_masses_chunked(q, k, **arguments)
        from patternsearch.kernels.score import score_masses

        assert arguments["lse"] is not None, "the triton backend needs the rows' log-sum-exp"
        masses: ScoreMasses = score_masses(q, k, **arguments)
        return masses
