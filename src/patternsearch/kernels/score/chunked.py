# SPDX-License-Identifier: Apache-2.0
"""One-pass masses in plain PyTorch: any device, memory O(n · buckets + (n/64)²), never n×n.

For each segment (at most 64 query rows of one tile and one region) the probabilities of its rows
are computed once and summed over the rows. A (segment, key) pair has one bucket in every ``tile``
and ``offset`` table, so those column sums, 1/64 of the pairs, yield all masses but the
element-wise ones: ``slash`` tables, offset sums and the triangles at the edge of a window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from patternsearch.kernels.score.tables import BucketTable, ScoreMasses
from patternsearch.patterns.geometry import NUM_REGIONS, num_tiles, query_segments

__all__ = ["score_masses_chunked"]

_SEGMENT = 64
_CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
"""Largest number of probabilities held at a time, by device type; at least one kv head's."""
_SUMS_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Largest number of column sums of segments held at a time, by device type."""


def score_masses_chunked(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    lse: Tensor | None = None,
    tables: Sequence[BucketTable] = (),
    column_sums: bool = False,
    offset_sums: bool = False,
    a_shape_sinks: Sequence[int] = (),
    a_shape_windows: Sequence[int] = (),
) -> ScoreMasses:
    """Reduce the causal attention probabilities of one layer; deterministic, float32.

    Args:
        q: [1, Hq, n, d], floating, any strides; computed in float32.
        k: [1, Hkv, n, d], not repeated; head h reads kv head h // (Hq / Hkv).
        scale: factor of the logits.
        lse: float32 [Hq, n], natural log-sum-exp of the scaled logits of each row, or None to
            normalise each row here.
        tables: bucket tables to reduce under (:class:`BucketTable`).
        column_sums: fill ``column_sum``.
        offset_sums: fill ``offset_sum``.
        a_shape_sinks: sinks in tokens; with ``a_shape_windows`` fills ``a_shape_logical``.
        a_shape_windows: windows in tokens.

    Returns:
        The masses, on q's device.
    """
    _check(q, k, lse, tables)
    state = _Pass(
        q=q[0],
        k=k[0],
        scale=scale,
        lse=lse,
        tables=tuple(tables),
        offset_sums=offset_sums,
        sinks=tuple(a_shape_sinks),
        windows=tuple(a_shape_windows),
    )
    num_heads, n = q.shape[1], q.shape[2]
    bounds, region = query_segments(n, _SEGMENT)
    padded = num_tiles(n, _SEGMENT) * _SEGMENT
    zeros = q.new_zeros
    segment_mass = zeros(num_heads, len(region), padded // _SEGMENT, dtype=torch.float32)
    column_mass = tuple(
        zeros(num_heads, table.num_buckets, NUM_REGIONS, n, dtype=torch.float32) for table in tables
    )
    column_sum = zeros(num_heads, n, dtype=torch.float32) if column_sums else None
    offset_sum = zeros(num_heads, n, dtype=torch.float32) if offset_sums else None
    logical = None
    if a_shape_sinks and a_shape_windows:
        shape = (num_heads, len(a_shape_sinks), len(a_shape_windows))
        logical = zeros(shape, dtype=torch.float32)

    segments = [_Segment(first, last) for first, last in pairwise(bounds.tolist())]
    for heads in state.head_groups():
        for r, first, last in _runs(region.tolist(), state.segments_at_once(heads)):
            out = _RunOutputs(
                column_mass=[mass[heads, :, r] for mass in column_mass],
                offset_sum=None if offset_sum is None else offset_sum[heads],
                logical=None if logical is None else logical[heads],
            )
            sums = state.run(heads, segments[first:last], out)
            segment_mass[heads, first:last, : sums.shape[1]] = sums.sum(-1).transpose(1, 2)
            if column_sum is not None:
                total = sums.sum(2).flatten(1)
                width = min(n, total.shape[1])
                column_sum[heads, :width] += total[:, :width]
    return ScoreMasses(segment_mass, column_mass, column_sum, offset_sum, logical)


def _check(q: Tensor, k: Tensor, lse: Tensor | None, tables: Sequence[BucketTable]) -> None:
    assert q.ndim == k.ndim == 4, (q.shape, k.shape)
    assert q.shape[0] == k.shape[0] == 1, (q.shape, k.shape)
    num_heads, n, dim = q.shape[1:]
    assert k.shape[2:] == (n, dim), (q.shape, k.shape)
    assert num_heads % k.shape[1] == 0, (q.shape, k.shape)
    assert q.is_floating_point(), q.dtype
    assert n > 0
    assert lse is None or lse.shape == (num_heads, n), lse.shape
    for table in tables:
        entries = {
            "tile": num_tiles(n, table.tile),
            "offset": num_tiles(n, table.tile) * table.tile,
            "slash": n,
        }[table.kind]
        assert table.bucket.shape == (num_heads, entries), (table.kind, table.bucket.shape)
        assert table.kind == "slash" or table.tile % _SEGMENT == 0, table.tile


def _runs(region: Sequence[int], limit: int) -> Iterator[tuple[int, int, int]]:
    """Yield (region, first, last) of runs of at most ``limit`` segments within one region."""
    first = 0
    for s in range(1, len(region) + 1):
        if s == len(region) or region[s] != region[first] or s - first == limit:
            yield region[first], first, s
            first = s


@dataclass(frozen=True, slots=True)
class _Segment:
    """Query rows [first, last) of one tile of 64."""

    first: int
    last: int

    @property
    def tile(self) -> int:
        return self.first // _SEGMENT


@dataclass(frozen=True, slots=True)
class _RunOutputs:
    """Views of the results that a run of segments adds to, for its heads and its region."""

    column_mass: list[Tensor]  # [heads, buckets, n] each
    offset_sum: Tensor | None  # [heads, n]
    logical: Tensor | None  # [heads, sinks, windows]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The inputs of a pass over one layer; heads are taken in whole groups of a kv head."""

    q: Tensor  # [Hq, n, d]
    k: Tensor  # [Hkv, n, d]
    scale: float
    lse: Tensor | None
    tables: tuple[BucketTable, ...]
    offset_sums: bool
    sinks: tuple[int, ...]
    windows: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return int(self.q.shape[0]) // int(self.k.shape[0])

    def _limit(self, limits: dict[str, int]) -> int:
        return limits.get(str(self.q.device.type), limits["cuda"])

    def head_groups(self) -> Iterator[slice]:
        """Yield slices of query heads whose probabilities of one segment fit the limit."""
        per_kv_head = self.group * _SEGMENT * self.q.shape[1]
        step = self.group * max(1, self._limit(_CHUNK_ELEMENTS) // per_kv_head)
        for first in range(0, self.q.shape[0], step):
            yield slice(first, min(first + step, self.q.shape[0]))

    def segments_at_once(self, heads: slice) -> int:
        """Return how many segments' column sums may be held at a time."""
        per_segment = (heads.stop - heads.start) * int(self.q.shape[1])
        limit: int = self._limit(_SUMS_ELEMENTS) // per_segment
        return max(1, limit)

    def run(self, heads: slice, segments: Sequence[_Segment], out: _RunOutputs) -> Tensor:
        """Add the masses of consecutive segments of one region to ``out``.

        Returns:
            [heads, key tiles, segments, 64], the probabilities summed over each segment's rows;
            the key tiles are those that the last segment reaches.
        """
        num_heads, device = heads.stop - heads.start, self.q.device
        tiles = segments[-1].tile + 1
        kv = slice(heads.start // self.group, heads.stop // self.group)
        keys = torch.zeros(kv.stop - kv.start, tiles * _SEGMENT, self.k.shape[2], device=device)
        rows = min(tiles * _SEGMENT, self.k.shape[1])
        keys[:, :rows] = self.k[kv, :rows]
        room = _SEGMENT * (tiles * _SEGMENT + (_SEGMENT if self.offset_sums else 0))
        buffer = torch.empty(num_heads * room, device=device)
        sums = torch.zeros(num_heads, tiles, len(segments), _SEGMENT, device=device)
        ones = torch.ones(num_heads, 1, _SEGMENT, device=device)
        above = torch.ones(_SEGMENT, _SEGMENT, dtype=torch.bool, device=device).triu(1)
        slashes = [
            _SlashMasks(table, heads, self.q.shape[1], self.q.device)
            if table.kind == "slash"
            else None
            for table in self.tables
        ]

        for s, segment in enumerate(segments):
            p = self._probabilities(heads, segment, keys, buffer, above)
            totals = torch.bmm(ones[:, :, : p.shape[1]], p)
            sums[:, : segment.tile + 1, s] = totals.view(num_heads, -1, _SEGMENT)
            if out.offset_sum is not None:
                _add_offset_sums(p, segment, out.offset_sum)
            if out.logical is not None:
                self._add_window_edges(p, segment, out.logical)
            for masks, mass in zip(slashes, out.column_mass, strict=True):
                if masks is not None:
                    masks.add(p, segment, mass)

        for table, mass in zip(self.tables, out.column_mass, strict=True):
            if table.kind == "tile":
                _add_tile_buckets(sums, segments, table, heads, mass)
            elif table.kind == "offset":
                _add_offset_buckets(sums, segments, table, heads, mass)
        if out.logical is not None:
            self._add_whole_columns(sums, segments, out.logical)
        return sums

    def _probabilities(
        self, heads: slice, segment: _Segment, keys: Tensor, buffer: Tensor, above: Tensor
    ) -> Tensor:
        """Return [heads, rows, keys up to the end of the tile], rows **last first**.

        Probabilities of keys after the query are 0. The result is a view of ``buffer``; with
        offset sums it is followed by 64 columns of zeros.
        """
        num_heads = heads.stop - heads.start
        num_kv = keys.shape[0]
        rows = segment.last - segment.first
        width = (segment.tile + 1) * _SEGMENT
        pitch = width + (_SEGMENT if self.offset_sums else 0)
        queries = self.q[heads, segment.first : segment.last].flip(1).float() * self.scale
        padded = buffer[: num_heads * rows * pitch].view(num_kv, -1, pitch)
        p = padded[..., :width]
        torch.bmm(
            queries.reshape(num_kv, -1, queries.shape[-1]), keys[:, :width].transpose(1, 2), out=p
        )
        by_row = padded.view(num_heads, rows, pitch)[..., :width]
        start = segment.first - segment.tile * _SEGMENT
        by_row[..., -_SEGMENT:].masked_fill_(above[start : start + rows].flip(0), float("-inf"))
        if self.lse is not None:
            by_row.sub_(self.lse[heads, segment.first : segment.last].flip(1)[..., None]).exp_()
        elif pitch == width:
            torch.softmax(by_row, dim=-1, out=by_row)
        else:
            by_row.copy_(torch.softmax(by_row, dim=-1))
        if pitch > width:
            padded[..., width:] = 0
        return by_row

    def _add_window_edges(self, p: Tensor, segment: _Segment, logical: Tensor) -> None:
        """Add the window pairs of the key columns that some rows of the segment see and some not.

        Those keys are j in (first − window, last − 1 − window]; of them i − j < window, which
        with rows backwards is r + c > rows − 2 at the c-th of them.
        """
        rows = p.shape[1]
        inside = torch.ones(rows, rows, device=p.device).triu().flip(0)[:, :-1]
        for y, window in enumerate(self.windows):
            start, stop = max(0, segment.first - window + 1), segment.last - window
            if start >= stop:
                continue
            edge = inside[:, rows - 1 - (stop - start) :]
            column = (p[..., start:stop] * edge).sum(1)
            for x, sink in enumerate(self.sinks):
                logical[:, x, y] += column[:, max(0, sink - start) :].sum(-1)

    def _add_whole_columns(
        self, sums: Tensor, segments: Sequence[_Segment], logical: Tensor
    ) -> None:
        """Add the sink columns, and the window's columns that all rows of a segment see."""
        device = sums.device
        running = sums.transpose(1, 2).flatten(2).cumsum(-1)
        running = torch.nn.functional.pad(running, (1, 0))
        last = torch.tensor([segment.last for segment in segments], device=device)
        row = torch.arange(len(segments), device=device)
        for x, sink in enumerate(self.sinks):
            sink_end = last.clamp(max=sink)
            for y, window in enumerate(self.windows):
                # Keys from last − window on are in the window of every row of the segment.
                start = torch.maximum((last - window).clamp(min=0), sink_end)
                mass = running[:, row, sink_end] + running[:, row, last] - running[:, row, start]
                logical[:, x, y] += mass.sum(-1)


def _add_offset_sums(p: Tensor, segment: _Segment, offset_sum: Tensor) -> None:
    """Add the sums along δ = i − j.

    Rows run backwards, so row r and key j have r + j = last − 1 − δ: reading the buffer with a
    pitch one shorter turns these antidiagonals into columns. The zeros after each row absorb what
    the skew carries over.
    """
    num_heads, rows, width = p.shape
    pitch = p.stride(1)
    span = width + rows - 1
    skewed = p.as_strided((num_heads, rows, span), (p.stride(0), pitch - 1, 1))
    total = skewed.sum(1)  # [heads, span], at r + j
    # Columns 0..last−1 are δ = last−1..0; later ones lie above the diagonal and hold zeros.
    offset_sum[:, : segment.last] += total[:, : segment.last].flip(1)


class _SlashMasks:
    """Adds masses by the bucket of δ = i − j, element by element."""

    def __init__(self, table: BucketTable, heads: slice, n: int, device: torch.device) -> None:
        self.num_buckets = table.num_buckets
        # Reversed, with a tail for the pairs above the diagonal, whose probability is 0.
        bucket = table.bucket[heads].flip(1)
        self.bucket = torch.nn.functional.pad(bucket, (0, _SEGMENT))
        self.n = n

    def add(self, p: Tensor, segment: _Segment, mass: Tensor) -> None:
        num_heads, rows, width = p.shape
        # Row r is position last − 1 − r; δ of key j is at n − 1 − δ = n − last + r + j.
        bucket = self.bucket.as_strided(
            (num_heads, rows, width),
            (self.bucket.stride(0), 1, 1),
            self.bucket.storage_offset() + self.n - segment.last,
        )
        width = min(width, self.n)
        for b in range(1, self.num_buckets + 1):
            chosen = torch.where(bucket == b, p, 0)
            mass[:, b - 1, :width] += chosen.sum(1)[:, :width]


def _add_tile_buckets(
    sums: Tensor,
    segments: Sequence[_Segment],
    table: BucketTable,
    heads: slice,
    mass: Tensor,
) -> None:
    """Add sums [heads, key tiles, segments, 64] to mass [heads, buckets, n] by tile diagonal."""
    num_heads, tiles = sums.shape[:2]
    device = sums.device
    per_tile = table.tile // _SEGMENT
    query = torch.tensor([segment.tile // per_tile for segment in segments], device=device)
    key = torch.arange(tiles, device=device) // per_tile
    diagonal = (query[None, :] - key[:, None]).clamp(min=0)  # sums above the diagonal are 0
    bucket = table.bucket[heads][:, diagonal]  # [heads, tiles, segments]
    numbers = torch.arange(1, table.num_buckets + 1, device=device)
    chosen = (bucket[:, :, None, :] == numbers[:, None]).float()
    total = torch.bmm(chosen.flatten(0, 1), sums.flatten(0, 1))
    total = total.view(num_heads, tiles, table.num_buckets, _SEGMENT)
    total = total.transpose(1, 2).flatten(2)
    width = min(mass.shape[2], total.shape[2])
    mass[:, :, :width] += total[:, :, :width]


def _add_offset_buckets(
    sums: Tensor,
    segments: Sequence[_Segment],
    table: BucketTable,
    heads: slice,
    mass: Tensor,
) -> None:
    """Add sums to mass [heads, buckets, n] by e = T·(i // T) − j + T − 1."""
    tiles = sums.shape[1]
    device = sums.device
    end = torch.tensor(
        [table.tile * (segment.first // table.tile + 1) - 1 for segment in segments],
        device=device,
    )
    key = torch.arange(tiles * _SEGMENT, device=device).view(tiles, 1, _SEGMENT)
    entry = (end[:, None] - key).clamp(min=0)  # [tiles, segments, 64]
    bucket = table.bucket[heads][:, entry]
    width = min(mass.shape[2], tiles * _SEGMENT)
    for b in range(1, table.num_buckets + 1):
        total = torch.where(bucket == b, sums, 0).sum(2).flatten(1)
        mass[:, b - 1, :width] += total[:, :width]
