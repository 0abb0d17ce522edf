# SPDX-License-Identifier: Apache-2.0
"""The time model: what any candidate would take on the measured GPU, index included.

A time is predicted only from what was measured: another dtype, head_dim or pattern, a length
outside the table, or other sampled rows where only one number was measured, is refused by name.
Budgets beyond the measured ones are extrapolated. It is the cost model that selection uses.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from patternsearch.errors import TimingError
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
    describe,
)
from patternsearch.patterns.geometry import (
    effective_blocks,
    effective_vertical,
    num_tiles,
)
from patternsearch.timing.fit import Curve, Plane, Polyline, curve
from patternsearch.timing.table import (
    KERNEL_DTYPES,
    ModelError,
    Operation,
    TimingRow,
    TimingTable,
    load_timings,
)

__all__ = ["TimeModel", "held_out_errors", "load_time_model"]

Floats = NDArray[np.float64]

_Key = tuple[str, int | None]
"""Operation and tile."""


def load_time_model(path: str | os.PathLike[str], *, dtype: str, head_dim: int) -> "TimeModel":
    """Load a timing table for one class of attention shapes.

    Args:
        path: a table written by ``patternsearch bench``.
        dtype: torch name, such as ``bfloat16``.
        head_dim: of the model.

    Raises:
        TimingError: the table is invalid, was not measured for this dtype and head_dim, or was
            measured with other kernels than this installation's.
    """
    table = load_timings(path)
    table.require_these_kernels()
    return TimeModel(table, dtype=dtype, head_dim=head_dim)


class TimeModel:
    """Predicts milliseconds of one head's attention; a cost model for selection.

    Args:
        table: the measurements.
        dtype: torch name.
        head_dim: d.

    Attributes:
        device: the measured GPU.
        sha256: digest of the table.

    Raises:
        TimingError: the table has no rows for this dtype and head_dim.
    """

    unit: Literal["pairs", "ms"] = "ms"
    measured = True

    def __init__(self, table: TimingTable, *, dtype: str, head_dim: int) -> None:
        rows = [
            row
            for row in table.rows
            if (row.dtype, row.head_dim) == (dtype, head_dim) and not row.held_out
        ]
        if not rows:
            had = sorted({f"{row.dtype} head_dim {row.head_dim}" for row in table.rows})
            out = "say with --serve-dtype what will serve"
            if dtype in KERNEL_DTYPES:
                bench = f"`patternsearch bench --dtype {dtype} --head-dims {head_dim}`"
                out = f"measure them with {bench}, or {out}"
            raise TimingError(
                f"the timing table of {table.device} has no {dtype} head_dim {head_dim} times "
                f"(it has {', '.join(had)}): {out}"
            )
        self.device: str | None = table.device
        self.sha256: str | None = table.sha256
        self._shape = f"{dtype} head_dim {head_dim}"
        self._curves = _fit(rows)
        self._launch = _launches(rows)
        self._sampled: dict[_Key, set[int]] = defaultdict(set)
        for row in rows:
            if row.rows is not None:
                self._sampled[_row_key(row)].add(row.rows)

    def head_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> Floats:
        """Return milliseconds of one head, index included.

        Args:
            candidates: the C candidates of the last axis.
            num_tokens: n.
            tiles: [..., C], causal tiles read.
            columns: [..., C], gathered columns summed over query tiles.

        Raises:
            TimingError: a candidate or the length was not measured.
        """
        total = np.empty(np.shape(tiles))
        index = self.index_cost(candidates, num_tokens)
        for place, candidate in enumerate(candidates):
            kernel = self._kernel(candidate, num_tokens, tiles[..., place], columns[..., place])
            total[..., place] = index[place] + kernel
        return total

    def index_cost(self, candidates: Sequence[Candidate], num_tokens: int) -> Floats:
        """Return milliseconds of building one head's index, [C]; 0 for static patterns.

        Raises:
            TimingError: a candidate's index or the length was not measured.
        """
        return np.array([self._index(c, num_tokens) for c in candidates], dtype=np.float64)

    def launch_cost(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> float:
        """Return the milliseconds that the host launches for, in a layer of such heads.

        Heads of one index are launched together, and those of one tile size on one backend; the
        number of heads does not matter. 0 for what the table was measured without launches.

        Args:
            candidates: of the layer's H heads.
            num_tokens: n.
            tiles: [H], causal tiles read.
            columns: [H], gathered columns summed over query tiles.

        Raises:
            TimingError: a candidate or the length was not measured.
        """
        indices = {_launched_index(candidate) for candidate in set(candidates)}
        built = [
            min(self._launch.get(key, {}).values(), default=0.0)
            for key, _ in indices
            if key is not None
        ]
        kernels: dict[tuple[int | None, str], float] = defaultdict(float)
        for head in set(zip(candidates, tiles.tolist(), columns.tolist(), strict=True)):
            key, name = _operation(head[0]), self.backend(head[0], num_tokens, *head[1:])
            together = key[1], name
            kernels[together] = max(kernels[together], self._launch.get(key, {}).get(name, 0.0))
        return math.fsum([*built, *kernels.values()])  # whatever the order of the sets

    def require(self, candidates: Sequence[Candidate], lengths: Sequence[int]) -> None:
        """Refuse candidates and lengths that cannot be priced, before hours are spent on them.

        Raises:
            TimingError: a candidate or a length was not measured; names it.
        """
        for num_tokens in sorted(set(lengths)):
            self.index_cost(candidates, num_tokens)
            for candidate in candidates:
                self._backends(_operation(candidate), num_tokens, candidate)

    def backend(self, candidate: Candidate, num_tokens: int, tiles: float, columns: float) -> str:
        """Return the name of the fastest backend for the candidate's kernel (or for dense)."""
        curves = self._backends(_operation(candidate), num_tokens, candidate)
        if len(curves) == 1:
            return next(iter(curves))
        features = _features(candidate, num_tokens, np.array(tiles), np.array(columns))
        return min(curves, key=lambda name: float(curves[name](num_tokens, features)))

    def nearest_length(self, candidate: Candidate, num_tokens: int) -> int | None:
        """Return the length nearest to n at which the candidate's kernel can be priced.

        It is n itself where a backend covers it, and None where none was measured.
        """
        curves = self._curves.get(_operation(candidate), {}).values()
        if any(fitted.covers(num_tokens) for fitted in curves):
            return num_tokens
        measured = {length for fitted in curves for length in fitted.lengths}
        return min(measured, key=lambda n: (abs(n - num_tokens), n), default=None)

    def _kernel(self, candidate: Candidate, n: int, tiles: Floats, columns: Floats) -> Floats:
        curves = self._backends(_operation(candidate), n, candidate)
        features = _features(candidate, n, tiles, columns)
        times = [fitted(n, features) for fitted in curves.values()]
        return np.asarray(np.minimum.reduce(times) * _units(_operation(candidate), n))

    def _index(self, candidate: Candidate, n: int) -> float:
        key, features = _index_operation(candidate, n)
        if key is None:
            return 0.0
        curves = self._backends(key, n, candidate)
        sampled = self._sampled.get(key, set())
        if len(sampled) == 1 and features[0] not in sampled:
            raise TimingError(
                f"the timing table of {self.device} has {_spell(key)} times of {min(sampled)} "
                f"sampled rows only, and {describe(candidate)} samples {features[0]:.0f}: measure "
                "without --quick, or leave such candidates out with --kinds"
            )
        per_unit = min(float(fitted(n, features)) for fitted in curves.values())
        return per_unit * _units(key, n)

    def _backends(self, key: _Key, n: int, candidate: Candidate) -> dict[str, Curve]:
        """Return the curves that cover a length, by backend."""
        curves = self._curves.get(key)
        if curves is None:
            other = "" if key[0] == "dense" else ", or leave such candidates out with --kinds"
            raise TimingError(
                f"the timing table of {self.device} has no {_spell(key)} times for {self._shape}, "
                f"which {describe(candidate)} needs: measure again with `patternsearch bench`"
                f"{other}"
            )
        covering = {name: fitted for name, fitted in curves.items() if fitted.covers(n)}
        if not covering:
            ranges = sorted({(c.lengths[0], c.lengths[-1]) for c in curves.values()})
            spans = ", ".join(f"{low}..{high}" for low, high in ranges)
            raise TimingError(
                f"the timing table of {self.device} covers {_spell(key)} at {spans} tokens, not "
                f"{n}: measure that length with `patternsearch bench --lengths`"
            )
        return covering


def held_out_errors(table: TimingTable) -> tuple[ModelError, ...]:
    """Return the model's relative error on the rows it did not see: by operation, then ``all``."""
    found: dict[str, list[float]] = defaultdict(list)
    for dtype, head_dim in sorted({(row.dtype, row.head_dim) for row in table.rows}):
        mine = [row for row in table.rows if (row.dtype, row.head_dim) == (dtype, head_dim)]
        curves = _fit([row for row in mine if not row.held_out])
        for row in (row for row in mine if row.held_out):
            fitted = curves.get(_row_key(row), {}).get(row.backend)
            if fitted is None or not fitted.covers(row.num_tokens):
                continue
            per_unit = float(fitted(row.num_tokens, _row_features(row)))
            predicted = per_unit * _units(_row_key(row), row.num_tokens)
            found[row.op].append(abs(predicted / row.head_ms - 1.0))
    everything = [error for errors in found.values() for error in errors]
    named = [*sorted(found.items()), *([("all", everything)] if everything else [])]
    return tuple(
        ModelError(
            op=op,
            num_rows=len(errors),
            median=round(float(np.median(errors)), 6),
            worst=round(max(errors), 6),
        )
        for op, errors in named
    )


# --- operations, units and features ------------------------------------------------------------


def _operation(candidate: Candidate) -> _Key:
    match candidate:
        case Dense():
            return "dense", None
        case AShape():
            return "attend_a_shape", candidate.tile
        case VerticalSlashSpread() | VerticalSlashLastQ():
            return "attend_vertical_slash", candidate.tile
        case BlockSparse():
            return "attend_block_sparse", candidate.tile


def _features(candidate: Candidate, n: int, tiles: Floats, columns: Floats) -> Floats:
    """Return what one query tile reads, [..., 2]: tiles and gathered columns."""
    if isinstance(candidate, Dense):
        return np.zeros((*np.shape(tiles), 2))
    query_tiles = num_tiles(n, candidate.tile)
    return np.stack([tiles / query_tiles, columns / query_tiles], axis=-1)


def _index_operation(candidate: Candidate, n: int) -> tuple[_Key | None, Floats]:
    """Return the index op and its features: sampled rows, and columns or blocks."""
    match candidate:
        case Dense() | AShape():
            return None, np.zeros(2)
        case VerticalSlashSpread():
            rows = candidate.last_q + candidate.spread_rows
            budget = effective_vertical(n, candidate.vertical)
            return ("index_spread", candidate.tile), np.array([rows, budget], np.float64)
        case VerticalSlashLastQ():
            budget = effective_vertical(n, candidate.vertical)
            features = np.array([candidate.last_q, budget], np.float64)
            return ("index_last_q", candidate.tile), features
        case BlockSparse():
            budget = effective_blocks(n, candidate.tile, candidate.blocks)
            key = (f"index_{candidate.estimator}", candidate.tile)
            return key, np.array([0.0, budget])


def _launched_index(candidate: Candidate) -> tuple[_Key | None, int]:
    """Return the index op and its sampled rows: heads that share both share their launches."""
    key, features = _index_operation(candidate, 1)
    return key, int(features[0])


def _row_key(row: TimingRow) -> _Key:
    return row.op, row.tile


def _row_features(row: TimingRow) -> Floats:
    if row.op == "dense":
        return np.zeros(2)
    if row.op.startswith("index"):
        return np.array([row.rows or 0, row.budget or 0], np.float64)
    assert row.tile is not None
    assert row.tiles is not None
    assert row.columns is not None
    query_tiles = num_tiles(row.num_tokens, row.tile)
    return np.array([row.tiles / query_tiles, row.columns / query_tiles])


def _units(key: _Key, n: int) -> float:
    """Return the units of work that time is divided by before it is compared over lengths."""
    op, tile = key
    if op == "dense":
        return float(n) * n
    if op.startswith("attend"):
        assert tile is not None
        return float(num_tiles(n, tile))
    return float(n)


def _spell(key: _Key) -> str:
    op, tile = key
    return op if tile is None else f"{op} tile {tile}"


_SLICES: dict[Operation, type[Polyline] | type[Plane]] = {
    "dense": Polyline,
    "index_spread": Plane,
    "index_last_q": Plane,
    "index_pooled_query": Plane,
    "index_pooled": Plane,
    "attend_a_shape": Polyline,
    "attend_vertical_slash": Plane,
    "attend_block_sparse": Polyline,
}


def _launches(rows: Iterable[TimingRow]) -> dict[_Key, dict[str, float]]:
    """Return the host's median milliseconds by operation and backend."""
    times: dict[tuple[_Key, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.host_ms is not None:
            times[_row_key(row), row.backend].append(row.host_ms)
    found: dict[_Key, dict[str, float]] = defaultdict(dict)
    for (key, backend), values in times.items():
        found[key][backend] = float(np.median(values))
    return dict(found)


def _fit(rows: Iterable[TimingRow]) -> dict[_Key, dict[str, Curve]]:
    grouped: dict[tuple[_Key, str], list[TimingRow]] = defaultdict(list)
    for row in rows:
        grouped[_row_key(row), row.backend].append(row)
    curves: dict[_Key, dict[str, Curve]] = defaultdict(dict)
    for (key, backend), mine in grouped.items():
        values = [row.head_ms / _units(key, row.num_tokens) for row in mine]
        curves[key][backend] = curve(
            [row.num_tokens for row in mine],
            np.array([_row_features(row) for row in mine]),
            np.array(values),
            _SLICES[mine[0].op],
        )
    return dict(curves)
