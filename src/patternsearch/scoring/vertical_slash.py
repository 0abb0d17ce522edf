# SPDX-License-Identifier: Apache-2.0
"""Vertical-Slash candidates: from ranks to bucket tables, and from masses to captured mass.

The candidates of one index share their ranks. A budget's set is a prefix of the ranks, so all
pairs of budgets come from one table of masses by diagonal bucket and column: a pair misses what
lies in no chosen diagonal and no chosen column.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patternsearch.kernels._common.upload import upload
from patternsearch.kernels.index import rank
from patternsearch.kernels.score import BucketTable
from patternsearch.patterns.candidates import VerticalSlashLastQ, VerticalSlashSpread
from patternsearch.patterns.consumers import Consumer
from patternsearch.patterns.geometry import (
    FORCED_COLUMNS,
    FORCED_DIAGONALS,
    FORCED_SLASHES,
    diagonal_tiles,
    effective_diagonals,
    effective_slash,
    effective_vertical,
    num_tiles,
    region_rows,
    tile_rows,
)
from patternsearch.scoring.accounts import Accounts
from patternsearch.scoring.regions import SampledRegions

__all__ = ["Budgets", "ColumnRanks", "VerticalSlashIndex", "columns_that_run", "prepare"]

_PIECE = 4096
"""Columns of a product that is cut."""


def columns_that_run(
    candidate: VerticalSlashSpread | VerticalSlashLastQ, consumer: Consumer
) -> int:
    """Return the nominal column budget as the consumer runs it.

    vLLM and SGLang turn a ``vertical`` of exactly 30 into 130; what will run is what is scored.
    """
    if (
        consumer in ("vllm", "sglang")
        and isinstance(candidate, VerticalSlashLastQ)
        and candidate.vertical == 30
    ):
        return 130
    return candidate.vertical


@dataclass(frozen=True, slots=True)
class Budgets:
    """Distinct ascending budgets, and which of them each candidate has."""

    distinct: tuple[int, ...]
    of_candidate: tuple[int, ...]

    @classmethod
    def of(cls, budgets: Sequence[int]) -> "Budgets":
        """Sort and number the effective budgets of some candidates."""
        distinct = tuple(sorted(set(budgets)))
        return cls(distinct, tuple(distinct.index(budget) for budget in budgets))

    def buckets(self, scores: Tensor, num_forced: int) -> Tensor:
        """Return the number of budgets that do not select an entry, [Hq, entries] uint8 or int32.

        Args:
            scores: [Hq, entries].
            num_forced: leading entries that come first.
        """
        order = rank(scores, num_forced)
        places = torch.arange(order.shape[1], device=order.device)
        place = torch.empty_like(order).scatter_(1, order, places.expand_as(order))
        limits = upload(np.asarray(self.distinct), order.device)
        dtype = torch.uint8 if len(self.distinct) < 256 else torch.int32
        return torch.searchsorted(limits, place, right=True).to(dtype)


class ColumnRanks:
    """Column buckets of the indices of a layer; those with the same scores and budgets share."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, Budgets, Tensor]] = []

    def buckets(self, scores: Tensor, budgets: Budgets) -> Tensor:
        """Return ``budgets.buckets`` of column scores [Hq, n]."""
        for known_scores, known_budgets, buckets in self._known:
            if known_scores is scores and known_budgets.distinct == budgets.distinct:
                return buckets
        buckets = budgets.buckets(scores, FORCED_COLUMNS)
        self._known.append((scores, budgets, buckets))
        return buckets


@dataclass(frozen=True, slots=True)
class VerticalSlashIndex:
    """One index of a layer with the candidates that run on it.

    Attributes:
        rows: places of the candidates in the accounts, G of them.
        vertical: column budgets.
        extent: diagonal or slash budgets, in the order of the candidates.
        column_bucket: [Hq, n], which column budgets leave a column out.
        table: buckets of the physical set's tiles.
        logical_table: buckets of the offsets, for ``last_q``; its logical set is another one.
    """

    rows: tuple[int, ...]
    vertical: Budgets
    extent: Budgets
    column_bucket: Tensor
    table: BucketTable
    logical_table: BucketTable | None

    @property
    def tables(self) -> tuple[BucketTable, ...]:
        """The tables that the score pass has to reduce under, in order."""
        return (self.table,) if self.logical_table is None else (self.table, self.logical_table)

    def put(self, accounts: Accounts, column_mass: Sequence[Tensor]) -> None:
        """Enter the candidates.

        Args:
            accounts: receives the rows.
            column_mass: for each of ``tables``, float32 [Hq, B, 4, n].
        """
        n = accounts.n
        device = self.column_bucket.device
        at = (
            slice(None),
            upload(np.asarray(self.extent.of_candidate), device),
            upload(np.asarray(self.vertical.of_candidate), device),
        )
        rows = upload(np.asarray(region_rows(n)), device)
        captured = rows - self._missed(column_mass[0])[at]
        logical = None
        if self.logical_table is not None:
            logical = n - self._missed(column_mass[1])[at].sum(-1)
        tiles, pairs, columns = self._counts(n)
        accounts.put(
            self.rows,
            captured=captured,
            pairs=pairs[at],
            tiles=tiles[:, at[1]],
            columns=columns[at],
            logical=logical,
        )

    def left_out(self, heads: slice, tiles: int) -> Tensor:
        """Return float32 [heads, tiles, 64, V]: 1 where a column is outside a column budget."""
        device = self.column_bucket.device
        columns = self.column_bucket[heads]
        columns = torch.nn.functional.pad(columns, (0, max(0, tiles * 64 - columns.shape[1])))
        columns = columns[:, : tiles * 64].view(len(columns), tiles, 64, 1)
        return (columns > torch.arange(len(self.vertical.distinct), device=device)).float()

    def missed_by_unit(
        self, sums: Tensor, left_out: Tensor, by_columns: Tensor, heads: slice, first_row: Tensor
    ) -> Tensor:
        """Return float32 [heads, units, M, V]: what each pair of budgets misses of a unit's rows.

        Args:
            sums: [heads, key tiles, units, 64], the column sums of the units.
            left_out: [heads, key tiles, 64, V], of :meth:`left_out`.
            by_columns: [heads, key tiles, units, V], the product of both.
            heads: which heads these are.
            first_row: int64 [units], first row of each unit; all its rows are of one tile of 64.
        """
        tiles, device = sums.shape[1], sums.device
        tile = self.table.tile
        query = first_row // tile
        if self.table.kind == "tile":
            extents = torch.arange(self.table.num_buckets, device=device)
            key = torch.arange(tiles, device=device) * 64 // tile
            bucket = self.table.bucket[heads][:, (query - key[:, None]).clamp(min=0)]
            outside = (bucket[..., None] > extents).float()  # [heads, tiles, units, M]
            return torch.einsum("htsm,htsv->hsmv", outside, by_columns)
        key = torch.arange(tiles * 64, device=device).view(tiles, 1, 64)
        entry = (tile * (query + 1) - 1)[:, None] - key  # [tiles, units, 64]
        bucket = self.table.bucket[heads][:, entry.clamp(min=0)]
        parts = [
            torch.matmul(torch.where(bucket > extent, sums, 0), left_out).sum(1)
            for extent in range(self.table.num_buckets)
        ]
        return torch.stack(parts, dim=2)

    def put_sampled(self, accounts: Accounts, missed: Tensor, regions: SampledRegions) -> None:
        """Enter the candidates from a sample of rows; their logical mass is not known.

        Args:
            accounts: receives the rows.
            missed: [Hq, units, M, V].
            regions: turn units into regions.
        """
        device = missed.device
        extent = upload(np.asarray(self.extent.of_candidate), device)
        vertical = upload(np.asarray(self.vertical.of_candidate), device)
        captured = (
            regions.tables.unit_rows[:, None] - missed[:, :, extent, vertical]
        )  # [Hq, units, G]
        tiles, pairs, columns = self._counts(accounts.n)
        logical = None
        if self.logical_table is not None:
            logical = torch.full_like(captured[:, 0], float("nan"))
        accounts.put(
            self.rows,
            captured=regions.sum(captured.transpose(1, 2)),
            pairs=pairs[:, extent, vertical],
            tiles=tiles[:, extent],
            columns=columns[:, extent, vertical],
            logical=logical,
        )

    def _missed(self, mass: Tensor) -> Tensor:
        """Return float64 [Hq, M, V, 4]: the mass outside each pair of extent and column budget."""
        num_heads, num_extents, num_regions, n = mass.shape
        numbers = torch.arange(1, len(self.vertical.distinct) + 1, device=mass.device)
        left_out = (self.column_bucket[..., None] == numbers).float()  # [Hq, n, V]
        by_bucket = _products(mass.view(num_heads, -1, n), left_out)
        by_bucket = by_bucket.view(num_heads, num_extents, num_regions, -1).transpose(2, 3)
        # A budget misses its own bucket number and all later ones.
        return by_bucket.flip(1, 2).cumsum(1).cumsum(2).flip(1, 2)

    def _counts(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tiles [Hq, M], pairs [Hq, M, V] and gathered columns [Hq, M, V]."""
        tile, bucket = self.table.tile, self.table.bucket
        device = bucket.device
        num_heads, count = bucket.shape[0], num_tiles(n, tile)
        per_tile = bucket.shape[1] // count  # entries a tile: 1 of "tile", T of "offset"
        numbers = torch.arange(self.table.num_buckets, device=device)
        chosen = bucket[:, None] <= numbers[:, None]  # [Hq, M, entries]
        tiles = _tiles_read(self.table, chosen, n)
        pairs = (chosen * _pairs_by_entry(self.table, n)).sum(-1)

        outside = self.column_bucket
        if pad := count * tile - n:
            outside = torch.nn.functional.pad(outside, (0, pad), value=len(self.vertical.distinct))
        outside = outside.view(num_heads, count * per_tile, tile // per_tile, 1)
        budgets = torch.arange(len(self.vertical.distinct), device=device)
        columns_in = (outside <= budgets).sum(2, dtype=torch.float64)
        # Column j is gathered for query tile u if entry (u, j) is not chosen. Its entries are
        # those of its residue up to the one of the last query tile, which mirrors j.
        open_entry = (~chosen).view(num_heads, -1, count, per_tile)
        gathered = torch.bmm(open_entry.cumsum(2).flatten(2).flip(2).double(), columns_in)
        gathered_last = torch.bmm(open_entry.flatten(2).flip(2).double(), columns_in)
        pairs = pairs[..., None] + tile * gathered - (count * tile - n) * gathered_last
        return tiles, pairs, gathered


def _products(mass: Tensor, left_out: Tensor) -> Tensor:
    """Return float64 [Hq, rows, V]: the batched product of [Hq, rows, n] and [Hq, n, V].

    With few rows and columns a long n is cut into pieces, which occupy all of a GPU.
    """
    num_heads, rows, n = mass.shape
    whole = n - n % _PIECE if n >= 2 * _PIECE else 0
    pieces = mass[..., :whole].reshape(num_heads, rows, -1, _PIECE).transpose(1, 2)
    by_piece = torch.matmul(
        pieces, left_out[:, :whole].reshape(num_heads, -1, _PIECE, left_out.shape[2])
    )
    rest = torch.bmm(mass[..., whole:], left_out[:, whole:])
    return by_piece.sum(1, dtype=torch.float64) + rest


def _pairs_by_entry(table: BucketTable, n: int) -> Tensor:
    """Return the causal pairs of all query tiles that have an entry of the table, [entries]."""
    rows = tile_rows(n, table.tile)
    entry = torch.arange(table.bucket.shape[1], device=table.bucket.device)
    if table.kind == "tile":
        # Off the diagonal a tile holds its query tile's rows × T pairs.
        pairs = table.tile * (n - table.tile * entry)
        pairs[:1].fill_(int((rows * (rows + 1) // 2).sum()))  # an assignment would wait
        return pairs
    # Entry e of query tile u is key T·u + T − 1 − e: all rows see it if e ≥ T − 1, else the last.
    whole = n - table.tile * (entry // table.tile)
    rows_on_device = upload(rows, entry.device)
    hidden = table.tile - 1 - entry[: table.tile]
    partial = (rows_on_device - hidden[:, None]).clamp(min=0).sum(1)
    whole[: table.tile] = partial
    return whole


def _tiles_read(table: BucketTable, chosen: Tensor, n: int) -> Tensor:
    """Return the tiles read, [Hq, M].

    ``offset``: every maximal run of keys that a query tile reads is cut into tiles of T keys.
    """
    device = chosen.device
    if table.kind == "tile":
        weight = upload(diagonal_tiles(n, table.tile), device)
        return (chosen * weight).sum(-1)
    entry = torch.arange(chosen.shape[2], device=device)
    # Distance from the start of the run: entries since the last one not chosen.
    start = torch.where(chosen, -1, entry).cummax(-1).values + 1
    opens_tile = chosen & ((entry - start) % table.tile == 0)
    # Query tile u sees the entries before T·(u + 1).
    before = opens_tile.view(*chosen.shape[:2], -1, table.tile).sum(-1).cumsum(-1)
    return before.sum(-1)


def prepare(
    candidates: Sequence[VerticalSlashSpread] | Sequence[VerticalSlashLastQ],
    rows: Sequence[int],
    column_score: Tensor,
    extent_score: Tensor,
    consumer: Consumer,
    ranks: ColumnRanks,
) -> VerticalSlashIndex:
    """Rank an index and lay out its bucket tables.

    Args:
        candidates: of one estimator, one tile size and one index.
        rows: their places in the accounts.
        column_score: [Hq, n].
        extent_score: [Hq, tiles] of tile diagonals for ``spread``, [Hq, n] of offsets for
            ``last_q``.
        consumer: whose kernels run ``last_q`` candidates.
        ranks: of the columns, of all indices of the layer.
    """
    n, tile = column_score.shape[1], candidates[0].tile
    vertical = Budgets.of(
        [effective_vertical(n, columns_that_run(candidate, consumer)) for candidate in candidates]
    )
    column_bucket = ranks.buckets(column_score, vertical)
    if isinstance(candidates[0], VerticalSlashSpread):
        extent = Budgets.of(
            [
                effective_diagonals(n, tile, candidate.diagonals)
                for candidate in candidates
                if isinstance(candidate, VerticalSlashSpread)
            ]
        )
        bucket = extent.buckets(extent_score, FORCED_DIAGONALS)
        table = BucketTable("tile", tile, bucket, len(extent.distinct))
        return VerticalSlashIndex(tuple(rows), vertical, extent, column_bucket, table, None)
    extent = Budgets.of(
        [
            effective_slash(n, candidate.slash)
            for candidate in candidates
            if isinstance(candidate, VerticalSlashLastQ)
        ]
    )
    bucket = extent.buckets(extent_score, FORCED_SLASHES)
    logical = BucketTable("slash", tile, bucket, len(extent.distinct))
    if consumer == "patternsearch":
        table = BucketTable("tile", tile, _diagonal_buckets(bucket, tile), logical.num_buckets)
    else:
        table = BucketTable("offset", tile, _offset_buckets(bucket, tile), logical.num_buckets)
    return VerticalSlashIndex(tuple(rows), vertical, extent, column_bucket, table, logical)


def _diagonal_buckets(slash_bucket: Tensor, tile: int) -> Tensor:
    """Return [Hq, tiles]: the least bucket of the offsets with D ∈ {⌊δ/T⌋, ⌈δ/T⌉}."""
    padded = _pad_to_tiles(slash_bucket, tile)
    by_tile = padded.view(len(padded), -1, tile)
    floor = by_tile.amin(-1)
    # ⌈δ/T⌉ = D for the offsets after the first of tile D − 1 (the first of D is in the floor).
    ceiling = by_tile[:, :-1, 1:].amin(-1)
    floor[:, 1:] = torch.minimum(floor[:, 1:], ceiling)
    return floor


def _offset_buckets(slash_bucket: Tensor, tile: int) -> Tensor:
    """Return [Hq, T·tiles]: at e, the least bucket of the offsets δ with δ ≤ e < δ + T.

    Query tile u reads for δ the keys T·u − δ … T·u + T − 1 − δ, that is e = δ … δ + T − 1.
    """
    padded = _pad_to_tiles(slash_bucket, tile)
    highest = int(torch.iinfo(padded.dtype).max)
    windows = torch.nn.functional.pad(padded, (tile - 1, 0), value=highest)
    least: Tensor = windows.unfold(1, tile, 1).amin(-1)
    return least


def _pad_to_tiles(slash_bucket: Tensor, tile: int) -> Tensor:
    """Pad [Hq, n] to whole tiles with a bucket that never is the least."""
    n = slash_bucket.shape[1]
    highest = int(torch.iinfo(slash_bucket.dtype).max)
    return torch.nn.functional.pad(slash_bucket, (0, num_tiles(n, tile) * tile - n), value=highest)
