# SPDX-License-Identifier: Apache-2.0
"""How a GPU was measured to run fastest: execution choices that a table hands to the runtime.

They never change which pairs are read, so they are no part of a config.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from patternsearch.errors import TimingError
from patternsearch.kernels.attend import flash4
from patternsearch.kernels.attend.configs import AttendConfig, LaunchClass, LaunchTuning
from patternsearch.patterns.candidates import AShape, BlockSparse, Candidate
from patternsearch.patterns.geometry import (
    a_shape_counts,
    block_sparse_counts,
    effective_blocks,
)
from patternsearch.timing.model import TimeModel
from patternsearch.timing.table import LaunchSetting, TimingRow, TimingTable
from patternsearch.timing.workload import dense_backends

__all__ = ["FLASH4", "OWN", "Execution", "SparseName", "execution_on", "launch_tuning"]

OWN: Literal["triton"] = "triton"
"""This project's kernel; as a dense backend, on a list of every tile."""
FLASH4: Literal["flash4"] = "flash4"

SparseName = Literal["triton", "flash4"]
"""Backends of sparse heads, by their names in a table."""

_REMEMBERED = 2**12
"""Choices kept: a forward asks for every layer."""


def launch_tuning(settings: Iterable[LaunchSetting]) -> LaunchTuning:
    """Return the settings that are used, by class of launches.

    Raises:
        TimingError: a setting has values that this installation's kernels do not know.
    """
    tuning = {}
    for setting in settings:
        if not setting.is_used or setting.op != "attend" or setting.tile is None:
            continue
        shape = LaunchClass(setting.dtype, setting.head_dim, setting.tile, setting.has_columns)
        try:
            tuning[shape] = AttendConfig(**setting.values)  # type: ignore[arg-type]
        except TypeError as error:
            raise TimingError(
                f"the timing table has a launch setting that these kernels do not know ({error}): "
                "measure again with `patternsearch bench`"
            ) from None
    return tuning


@dataclass(frozen=True, slots=True)
class Execution:
    """Execution choices for one GPU.

    Attributes:
        tuning: how the sparse kernel is launched.
        rows: the table's dense rows of backends that are installed.
        models: times of the installed sparse backends, by dtype and head_dim; only where there
            is a choice between them.
        absent: (dtype, head_dim, backend) of backends that were fastest at some measurement and
            are not installed.
    """

    tuning: LaunchTuning
    rows: tuple[TimingRow, ...]
    models: Mapping[tuple[str, int], TimeModel] = field(default_factory=dict)
    absent: frozenset[tuple[str, int, str]] = frozenset()

    def dense(self, dtype: str, head_dim: int, num_tokens: int) -> str | None:
        """Return the installed backend that was fastest at the nearest measured length, by name.

        None where nothing installed was measured for the shape.
        """
        mine = [row for row in self.rows if (row.dtype, row.head_dim) == (dtype, head_dim)]
        if not mine:
            return None
        nearest = min({row.num_tokens for row in mine}, key=lambda n: abs(n - num_tokens))
        at = (row for row in mine if row.num_tokens == nearest)
        return min(at, key=lambda row: row.p50_ms).backend

    def sparse(
        self, patterns: Sequence[Candidate], dtype: str, head_dim: int, num_tokens: int
    ) -> SparseName:
        """Return the installed backend that the time model calls fastest for a layer.

        Outside the measured lengths the nearest one decides; ours runs what was not measured.

        Args:
            patterns: of the layer's sparse heads, which run together.
            dtype: torch name.
            head_dim: d.
            num_tokens: n.
        """
        model = self.models.get((dtype, head_dim))
        if model is None or not all(map(flash4.takes_pattern, patterns)):
            return OWN
        return _fastest_sparse(model, tuple(patterns), num_tokens)

    def missing(self, dtype: str, head_dim: int) -> tuple[str, ...]:
        """Return the backends that were fastest at some measurement and are not installed."""
        return tuple(sorted(name for d, h, name in self.absent if (d, h) == (dtype, head_dim)))

    def lack(self, dtype: str, head_dim: int) -> str | None:
        """Return what to tell a person about :meth:`missing` backends; None if there are none."""
        names = self.missing(dtype, head_dim)
        if not names:
            return None
        install = "pip install --pre 'patternsearch[fa4]', or " if FLASH4 in names else ""
        return (
            f"the timing table measured {' and '.join(names)} fastest for some {dtype} heads of "
            f"head_dim {head_dim}, and this machine has no such backend: heads run on the fastest "
            f"of those that it has, slower than there; {install}measure what is here with "
            "`patternsearch bench`"
        )


def execution_on(table: TimingTable, device: torch.device) -> Execution:
    """Return a table's execution choices for the GPU it was measured on.

    Raises:
        TimingError: the device is another GPU or none, or the table's kernels are not these.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if name != table.device:
        raise TimingError(
            f"the timing table was measured on {table.device} and this model is on {name}: its "
            "launch settings belong to that GPU; run `patternsearch bench` here, or leave timings "
            "out"
        )
    table.require_these_kernels()
    measured = [row for row in table.rows if not row.op.startswith("index")]
    dense = _installed_dense(device)
    has_flash4 = flash4.is_available(device)
    here = [row for row in measured if _runs_here(row, dense, has_flash4)]
    kept = {id(row) for row in here}
    return Execution(
        tuning=launch_tuning(table.settings),
        rows=tuple(row for row in here if row.op == "dense"),
        models=_models(table, [row for row in here if row.op != "dense"]),
        absent=frozenset(
            (row.dtype, row.head_dim, row.backend)
            for row in _fastest(measured)
            if id(row) not in kept
        ),
    )


def _installed_dense(device: torch.device) -> set[str]:
    installed: set[str] = {OWN}
    for backend in dense_backends(device):
        installed.add(backend.name)
        if backend.otherwise is not None:
            installed.add(backend.otherwise.name)
    return installed


def _runs_here(row: TimingRow, dense: set[str], has_flash4: bool) -> bool:
    if row.op == "dense":
        return row.backend in dense
    if row.backend == FLASH4:
        return has_flash4 and flash4.takes_inputs(row.dtype, row.head_dim)
    return row.backend == OWN


def _fastest(rows: Iterable[TimingRow]) -> Iterable[TimingRow]:
    """Return the fastest backend's row of each measurement."""
    best: dict[tuple[object, ...], TimingRow] = {}
    for row in rows:
        what = (
            row.op, row.dtype, row.head_dim, row.num_tokens, row.num_query_heads,
            row.num_kv_heads, row.tile, row.tiles, row.columns,
        )  # fmt: skip
        if what not in best or row.p50_ms < best[what].p50_ms:
            best[what] = row
    return best.values()


def _models(table: TimingTable, rows: list[TimingRow]) -> dict[tuple[str, int], TimeModel]:
    """Return the time model of each shape that both sparse backends were measured for."""
    some = [row for row in rows if row.op in ("attend_a_shape", "attend_block_sparse")]
    shapes = set.intersection(
        *(
            {(r.dtype, r.head_dim) for r in some if r.backend == name and not r.held_out}
            for name in (OWN, FLASH4)
        )
    )
    static = table.model_copy(update={"rows": tuple(some)})
    return {
        (dtype, head_dim): TimeModel(static, dtype=dtype, head_dim=head_dim)
        for dtype, head_dim in sorted(shapes)
    }


@lru_cache(maxsize=_REMEMBERED)
def _fastest_sparse(
    model: TimeModel, patterns: tuple[AShape | BlockSparse, ...], num_tokens: int
) -> SparseName:
    lengths = {model.nearest_length(pattern, num_tokens) for pattern in patterns}
    if len(lengths) != 1 or None in lengths:
        return OWN  # not measured, or not at one length
    (n,) = lengths
    assert n is not None
    tiles = np.array([_tiles_read(pattern, n) for pattern in patterns], dtype=np.float64)
    names = model.layer_backends(patterns, n, tiles, np.zeros_like(tiles))
    return FLASH4 if FLASH4 in names else OWN


def _tiles_read(pattern: AShape | BlockSparse, n: int) -> int:
    if isinstance(pattern, AShape):
        return a_shape_counts(n, pattern.tile, pattern.sink, pattern.window)[0]
    return block_sparse_counts(n, pattern.tile, effective_blocks(n, pattern.tile, pattern.blocks))[
        0
    ]
