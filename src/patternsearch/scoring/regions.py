# SPDX-License-Identifier: Apache-2.0
"""From sums over segments of rows to sums over regions: of all rows, or estimated from a sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patternsearch.patterns.geometry import NUM_REGIONS, region_rows
from patternsearch.patterns.row_sampling import RowSample

__all__ = ["Regions", "SampleTables", "SampledRegions"]

_RIDGE = 1e-3
"""Of the mean diagonal: what keeps a slope small where nothing that is known varies."""


class Regions:
    """Sums over the query rows of each region from sums over segments."""

    def __init__(self, n: int, segment_region: Sequence[int]) -> None:
        self.rows = region_rows(n)
        last = np.searchsorted(segment_region, np.arange(NUM_REGIONS), side="right")
        first = np.searchsorted(segment_region, np.arange(NUM_REGIONS), side="left")
        self._segments = [slice(int(a), int(b)) for a, b in zip(first, last, strict=True)]

    def sum(self, by_segment: Tensor) -> Tensor:
        """Sum [..., segments] to float64 [..., 4]."""
        parts = [by_segment[..., part].sum(-1, dtype=torch.float64) for part in self._segments]
        return torch.stack(parts, dim=-1)


class SampleTables:
    """What turns the units of a sample of rows into regions, on a device.

    Args:
        sample: which rows were scored.
        device: of the tensors.

    Attributes:
        sample: as given.
        unit_rows: int64 [units], rows of each.
        pairs: int64 [2, strata], the units of each stratum; the same twice where it has one.
        size: float64 [strata, 4], units that the stratum stands for, in its region.
        unit_size: float64 [units, 4], the same by unit: each stands for its part of the stratum.
        variance: float64 [strata, 4], factor of the squared difference of its two units.
        in_region: float64 [strata, 4], 1 in its region.
        rows_of_unit: int64 [units, most rows of one]; n for none.
        rows_of_stratum: int64 [strata, most rows of one]; n for none.
        sides: for the even and the odd strata, float64 [strata]: weights of the others' fit, and 1
            where it serves.
        is_whole: whether every row was scored.
    """

    def __init__(self, sample: RowSample, device: torch.device) -> None:
        assert sample.chosen.max() <= 2, "a stratum gives at most two units"
        self.sample = sample
        numbers = np.arange(len(sample.sizes))
        first = np.searchsorted(sample.stratum, numbers, side="left")
        last = np.searchsorted(sample.stratum, numbers, side="right") - 1
        in_region = (sample.stratum_region[:, None] == np.arange(NUM_REGIONS)).astype(np.float64)
        weights = sample.variance_weights
        self.is_whole = not weights.any()
        self.unit_rows = _on_device(sample.num_rows, device)
        self.pairs = _on_device(np.stack([first, last]), device)
        self.in_region = _on_device(in_region, device)
        self.size = _on_device(sample.sizes[:, None] * in_region, device)
        self.unit_size = _on_device(sample.weights[:, None] * in_region[sample.stratum], device)
        # The squared deviations from the mean of a pair add up to half its squared difference.
        self.variance = _on_device(weights[:, None] * in_region / 2, device)
        place = np.arange(int(sample.num_rows.max()))
        rows = sample.first_row[:, None] + sample.stride * place
        rows[place >= sample.num_rows[:, None]] = len(sample.row_stratum)
        self.rows_of_unit = _on_device(rows, device)
        self.rows_of_stratum = _on_device(_rows_by_owner(sample.row_stratum, len(first)), device)
        self.sides = [
            (_on_device(weights * (numbers % 2 != side), device),
             _on_device((numbers % 2 == side).astype(np.float64), device))
            for side in (0, 1)
        ]  # fmt: skip


class SampledRegions:
    """Estimates of the sums over the query rows of each region, from a sample of the rows.

    What is known of every row may correct for the rows that were not drawn (the difference
    estimator: Cochran, §7): a value is split into β times what is known and a rest; the first is
    summed over all rows, only the second is estimated. β is the least-squares slope within the
    strata; that of the even strata serves the odd ones and the other way round, so it does not
    depend on the draw that it corrects, and the estimate stays unbiased.

    Args:
        tables: of the sample.
        known: float32 [Hq, n, K], known of every row; None for nothing.
    """

    def __init__(self, tables: SampleTables, known: Tensor | None = None) -> None:
        self.tables = tables
        self._correction: tuple[Tensor, Tensor, Tensor] | None = None
        if known is None or tables.is_whole:
            return
        padded = torch.nn.functional.pad(known, (0, 0, 0, 1))

        def summed(rows: Tensor) -> Tensor:
            # A gather, since sums by index have no fixed order on CUDA.
            return padded[:, rows].sum(2, dtype=torch.float64).transpose(1, 2)

        first, last = self._of_strata(summed(tables.rows_of_unit))  # [Hq, K, strata]
        total = summed(tables.rows_of_stratum)
        fits, served, offsets = [], [], []
        for fit, serves in tables.sides:
            weighted = ((first - last) * fit).transpose(1, 2)
            # Its ridge makes the matrix regular; asking CUDA whether it is would wait for it.
            inverse = torch.linalg.inv_ex(_ridged((first - last) @ weighted)).inverse
            fits.append(weighted @ inverse)
            served.append((first - last) * serves)
            estimate = (first + last) * serves @ (tables.size / 2)
            offsets.append(total * serves @ tables.in_region - estimate)
        self._correction = (torch.cat(fits, 2), torch.cat(served, 1), torch.cat(offsets, 1))

    def sum(self, by_unit: Tensor) -> Tensor:
        """Turn values of units into float64 [Hq, ..., 8]: sums by region, then variances.

        Args:
            by_unit: [Hq, ..., units], sums over the rows of each unit.
        """
        values = by_unit.double().flatten(1, -2)
        first, last = self._of_strata(values)
        difference = first - last
        sums = values @ self.tables.unit_size
        if self._correction is not None:
            fit, served, offset = self._correction
            slope = difference @ fit  # [Hq, G, 2·K], of the even and of the odd strata
            sums = sums + slope @ offset
            difference = difference - slope @ served
        variances = difference.square() @ self.tables.variance
        return torch.cat([sums, variances], dim=-1).view(*by_unit.shape[:-1], 2 * NUM_REGIONS)

    def _of_strata(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Turn [..., units] into the first and the last unit of each stratum, [..., strata]."""
        return values[..., self.tables.pairs[0]], values[..., self.tables.pairs[1]]


def _on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy without waiting for what the device does."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _rows_by_owner(owner: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return int64 [count, most rows of one]: the rows of each owner, then len(owner).

    Args:
        owner: int64 [n], whose each row is.
        count: owners.
    """
    # NumPy sorts 16-bit numbers by radix.
    keys = owner.astype(np.uint16) if count < 2**16 else owner
    rows = np.argsort(keys, kind="stable")
    mine = owner[rows]
    sizes = np.bincount(mine, minlength=count)
    place = np.arange(len(rows)) - (sizes.cumsum() - sizes)[mine]
    table = np.full((count, int(sizes.max())), len(owner))
    table[mine, place] = rows
    return table


def _ridged(gram: Tensor) -> Tensor:
    """Add a thousandth of the mean diagonal, and a trace of 1, so that it can be inverted."""
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    return gram + (_RIDGE * size + 1e-9) * torch.eye(
        gram.shape[-1], dtype=gram.dtype, device=gram.device
    )
