# SPDX-License-Identifier: Apache-2.0
"""The time model: what any candidate would take on the measured GPU, index included.

A time is predicted only from what was measured: another dtype, head_dim or pattern, a length
outside the table, or other sampled rows where only one number was measured, is refused by name.
Budgets beyond the measured ones are extrapolated. It is the cost model that selection uses.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from patternsearch.errors import TimingError
from patternsearch.patterns.candidates import (
    Candidate,
    Dense,
    describe,
)
from patternsearch.timing.features import (
    Key,
    features_of,
    index_operation,
    launched_index,
    operation_of,
    row_features,
    row_key,
    spell,
    units_of,
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
        self._curves = _fit(row for row in rows if not _is_of_layers(row))
        self._of_layers = _fit(row for row in rows if _is_of_layers(row))
        self._launch = _launches(rows)
        self._sampled: dict[Key, set[int]] = defaultdict(set)
        for row in rows:
            if row.rows is not None:
                self._sampled[row_key(row)].add(row.rows)

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
        indices = {launched_index(candidate) for candidate in set(candidates)}
        built = [
            min(self._launch.get(key, {}).values(), default=0.0)
            for key, _ in indices
            if key is not None
        ]
        kernels: dict[tuple[int | None, str], float] = defaultdict(float)
        names = self.layer_backends(candidates, num_tokens, tiles, columns)
        for key, name in set(zip(map(operation_of, candidates), names, strict=True)):
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
                self._backends(operation_of(candidate), num_tokens, candidate)

    def layer_backends(
        self, candidates: Sequence[Candidate], num_tokens: int, tiles: Floats, columns: Floats
    ) -> tuple[str, ...]:
        """Return the names of the backends that the heads of a layer run on.

        A dense head runs on the fastest dense backend, a sparse one on the sparse kernel that is
        priced; or all sparse heads together on another kernel that is faster for their sum.

        The arguments, and what is raised, are as for :meth:`launch_cost`.
        """
        names: list[str] = []
        alone: list[float] = []
        together: dict[str, list[float]] = defaultdict(list)
        for head in zip(candidates, tiles, columns, strict=True):
            key = operation_of(head[0])
            times = _times(self._backends(key, num_tokens, head[0]), num_tokens, *head)
            names.append(min(times, key=times.__getitem__))
            if key[0] == "dense":
                continue
            alone.append(float(times[names[-1]]))
            curves = self._of_layers.get(key, {})
            covering = {name: curve for name, curve in curves.items() if curve.covers(num_tokens)}
            for name, time in _times(covering, num_tokens, *head).items():
                together[name].append(float(time))
        sums = {name: math.fsum(t) for name, t in together.items() if len(t) == len(alone)}
        other = min(sums, key=sums.__getitem__, default=None)
        if other is None or sums[other] >= math.fsum(alone):
            return tuple(names)
        return tuple(
            name if isinstance(candidate, Dense) else other
            for candidate, name in zip(candidates, names, strict=True)
        )

    def nearest_length(self, candidate: Candidate, num_tokens: int) -> int | None:
        """Return the length nearest to n at which the candidate's kernel can be priced.

        It is n itself where a backend covers it, and None where none was measured.
        """
        curves = self._curves.get(operation_of(candidate), {}).values()
        if any(fitted.covers(num_tokens) for fitted in curves):
            return num_tokens
        measured = {length for fitted in curves for length in fitted.lengths}
        return min(measured, key=lambda n: (abs(n - num_tokens), n), default=None)

    def _kernel(self, candidate: Candidate, n: int, tiles: Floats, columns: Floats) -> Floats:
        curves = self._backends(operation_of(candidate), n, candidate)
        times = _times(curves, n, candidate, tiles, columns)
        return np.asarray(np.minimum.reduce(list(times.values())))

    def _index(self, candidate: Candidate, n: int) -> float:
        key, features = index_operation(candidate, n)
        if key is None:
            return 0.0
        curves = self._backends(key, n, candidate)
        sampled = self._sampled.get(key, set())
        if len(sampled) == 1 and features[0] not in sampled:
            raise TimingError(
                f"the timing table of {self.device} has {spell(key)} times of {min(sampled)} "
                f"sampled rows only, and {describe(candidate)} samples {features[0]:.0f}: measure "
                "without --quick, or leave such candidates out with --kinds"
            )
        per_unit = min(float(fitted(n, features)) for fitted in curves.values())
        return per_unit * units_of(key, n)

    def _backends(self, key: Key, n: int, candidate: Candidate) -> dict[str, Curve]:
        """Return the curves that cover a length, by backend."""
        curves = self._curves.get(key)
        if curves is None:
            other = "" if key[0] == "dense" else ", or leave such candidates out with --kinds"
            raise TimingError(
                f"the timing table of {self.device} has no {spell(key)} times for {self._shape}, "
                f"which {describe(candidate)} needs: measure again with `patternsearch bench`"
                f"{other}"
            )
        covering = {name: fitted for name, fitted in curves.items() if fitted.covers(n)}
        if not covering:
            ranges = sorted({(c.lengths[0], c.lengths[-1]) for c in curves.values()})
            spans = ", ".join(f"{low}..{high}" for low, high in ranges)
            raise TimingError(
                f"the timing table of {self.device} covers {spell(key)} at {spans} tokens, not "
                f"{n}: measure that length with `patternsearch bench --lengths`"
            )
        return covering


_OF_LAYERS = ("flash4",)
"""Sparse backends that run all sparse heads of a layer or none, and that heads are not priced by.

Two kernels for one layer each read all queries and write all outputs.
"""


def _is_of_layers(row: TimingRow) -> bool:
    return row.op != "dense" and row.backend in _OF_LAYERS


def _times(
    curves: Mapping[str, Curve], n: int, candidate: Candidate, tiles: Floats, columns: Floats
) -> dict[str, Floats]:
    """Return milliseconds of one head by backend, in the shape of ``tiles``."""
    features = features_of(candidate, n, tiles, columns)
    units = units_of(operation_of(candidate), n)
    return {name: np.asarray(fitted(n, features) * units) for name, fitted in curves.items()}


def held_out_errors(table: TimingTable) -> tuple[ModelError, ...]:
    """Return the model's relative error on the rows it did not see: by operation, then ``all``."""
    found: dict[str, list[float]] = defaultdict(list)
    for dtype, head_dim in sorted({(row.dtype, row.head_dim) for row in table.rows}):
        mine = [row for row in table.rows if (row.dtype, row.head_dim) == (dtype, head_dim)]
        curves = _fit([row for row in mine if not row.held_out])
        for row in (row for row in mine if row.held_out):
            fitted = curves.get(row_key(row), {}).get(row.backend)
            if fitted is None or not fitted.covers(row.num_tokens):
                continue
            per_unit = float(fitted(row.num_tokens, row_features(row)))
            predicted = per_unit * units_of(row_key(row), row.num_tokens)
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


def _launches(rows: Iterable[TimingRow]) -> dict[Key, dict[str, float]]:
    """Return the host's median milliseconds by operation and backend."""
    times: dict[tuple[Key, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.host_ms is not None:
            times[row_key(row), row.backend].append(row.host_ms)
    found: dict[Key, dict[str, float]] = defaultdict(dict)
    for (key, backend), values in times.items():
        found[key][backend] = float(np.median(values))
    return dict(found)


def _fit(rows: Iterable[TimingRow]) -> dict[Key, dict[str, Curve]]:
    grouped: dict[tuple[Key, str], list[TimingRow]] = defaultdict(list)
    for row in rows:
        grouped[row_key(row), row.backend].append(row)
    curves: dict[Key, dict[str, Curve]] = defaultdict(dict)
    for (key, backend), mine in grouped.items():
        values = [row.head_ms / units_of(key, row.num_tokens) for row in mine]
        curves[key][backend] = curve(
            [row.num_tokens for row in mine],
            np.array([row_features(row) for row in mine]),
            np.array(values),
            _SLICES[mine[0].op],
        )
    return dict(curves)
