# SPDX-License-Identifier: Apache-2.0
"""What evaluation collects for each candidate, on the device, and the result it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from patternsearch.errors import ModelError
from patternsearch.kernels.index.upload import upload
from patternsearch.patterns.candidates import Candidate, Index
from patternsearch.patterns.geometry import NUM_REGIONS, causal_pairs, region_bounds, region_rows
from patternsearch.patterns.row_sampling import RowSample

__all__ = ["Accounts", "LayerScores", "Regions", "SampledRegions", "joined_heads"]

_ROUNDING = 1e-4
"""How far float32 sums of probabilities may carry a mass outside [0, 1]; more is a fault."""

_CAPTURED = slice(0, NUM_REGIONS)
_LOGICAL, _PAIRS, _TILES, _COLUMNS = range(NUM_REGIONS, NUM_REGIONS + 4)
_VARIANCE = slice(NUM_REGIONS + 4, 2 * NUM_REGIONS + 4)
_FIELDS = 2 * NUM_REGIONS + 4
_RIDGE = 1e-3
"""Of the mean diagonal: what keeps a slope small where nothing that is known varies."""
_CONFIDENCE = 0.95
"""One-sided, of the lower bounds."""


@dataclass(frozen=True, slots=True)
class LayerScores:
    """Scores of every head of a layer; R rows a head, in the order of the scores table.

    Attributes:
        specs: the candidate and the index of each row.
        mass: float64 [Hq, R, 5], physical captured mass over all query rows and over each
            quarter; NaN for a quarter without rows (n < 4).
        logical: float64 [Hq, R], captured mass of the logical set.
        density: float64 [Hq, R], causal pairs read of all causal pairs.
        tiles: int64 [Hq, R], causal tiles read, of the candidate's own size; of 64 for dense.
        columns: int64 [Hq, R], chosen columns gathered outside the tiles, summed over query tiles.
        error: float64 [Hq, R, 5], standard error of ``mass``; None if every row was scored.
        low: float64 [Hq, R, 5], lower 95% confidence bound of ``mass``; None likewise.
    """

    specs: tuple[tuple[Candidate, Index], ...]
    mass: NDArray[np.float64]
    logical: NDArray[np.float64]
    density: NDArray[np.float64]
    tiles: NDArray[np.int64]
    columns: NDArray[np.int64]
    error: NDArray[np.float64] | None = None
    low: NDArray[np.float64] | None = None


def joined_heads(parts: Sequence[LayerScores]) -> LayerScores:
    """Put the scores of consecutive blocks of heads together."""
    if len(parts) == 1:
        return parts[0]

    def joined(name: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(part, name) for part in parts])

    sampled = parts[0].error is not None
    return LayerScores(
        specs=parts[0].specs,
        mass=joined("mass"),
        logical=joined("logical"),
        density=joined("density"),
        tiles=joined("tiles").astype(np.int64),
        columns=joined("columns").astype(np.int64),
        error=joined("error") if sampled else None,
        low=joined("low") if sampled else None,
    )


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


class SampledRegions:
    """Estimates of the sums over the query rows of each region, from a sample of the rows.

    What is known of every row may correct for the rows that were not drawn (the difference
    estimator: Cochran, §7): a value is split into β times what is known and a rest; the first is
    summed over all rows, only the second is estimated. β is the least-squares slope within the
    strata; that of the even strata serves the odd ones and the other way round, so it does not
    depend on the draw that it corrects, and the estimate stays unbiased.

    Made before the kernels that it waits for are launched, it costs a GPU no time: its tables are
    laid out on the host.

    Args:
        sample: which rows were scored.
        device: of the tensors.
    """

    def __init__(self, sample: RowSample, device: torch.device) -> None:
        assert sample.chosen.max() <= 2, "a stratum gives at most two units"
        numbers = np.arange(len(sample.sizes))
        first = np.searchsorted(sample.stratum, numbers, side="left")
        last = np.searchsorted(sample.stratum, numbers, side="right") - 1
        in_region = (sample.stratum_region[:, None] == np.arange(NUM_REGIONS)).astype(np.float64)
        weights = sample.variance_weights
        self._pairs = _on_device(np.stack([first, last]), device)
        self._in_region = _on_device(in_region, device)
        self._size = _on_device(sample.sizes[:, None] * in_region, device)
        # The squared deviations from the mean of a pair add up to half its squared difference.
        self._variance = _on_device(weights[:, None] * in_region / 2, device)
        self.unit_rows = _on_device(sample.num_rows, device)
        """int64 [units], rows of each."""
        self._known: tuple[Tensor, Tensor, Tensor] | None = None
        self._estimates = bool(weights.any())
        if not self._estimates:
            return
        place = np.arange(int(sample.num_rows.max()))
        rows = sample.first_row[:, None] + sample.stride * place
        rows[place >= sample.num_rows[:, None]] = len(sample.row_stratum)
        self._rows_of_unit = _on_device(rows, device)
        self._rows_of_stratum = _on_device(_rows_by_owner(sample.row_stratum, len(first)), device)
        # The slope of the even strata for the odd ones, and the other way round.
        self._sides = [
            (_on_device(weights * (numbers % 2 != side), device),
             _on_device((numbers % 2 == side).astype(np.float64), device))
            for side in (0, 1)
        ]  # fmt: skip

    def know(self, known: Tensor) -> None:
        """Correct all later sums by what is known of every row, float32 [Hq, n, K]."""
        if not self._estimates:
            return
        padded = torch.nn.functional.pad(known, (0, 0, 0, 1))

        def summed(rows: Tensor) -> Tensor:
            # A gather, since sums by index have no fixed order on CUDA.
            return padded[:, rows].sum(2, dtype=torch.float64).transpose(1, 2)

        self._known = (
            *self._mean_and_difference(summed(self._rows_of_unit)),  # [Hq, K, strata]
            summed(self._rows_of_stratum),
        )

    def sum(self, by_unit: Tensor) -> Tensor:
        """Turn values of units into float64 [Hq, ..., 8]: sums by region, then variances.

        Args:
            by_unit: [Hq, ..., units], sums over the rows of each unit.
        """
        mean, difference = self._mean_and_difference(by_unit.double().flatten(1, -2))
        shift: Tensor | float = 0.0
        if self._known is not None:
            mean, difference, shift = self._corrected(mean, difference)
        variances = (difference * difference) @ self._variance
        sums = torch.cat([mean @ self._size + shift, variances], dim=-1)
        return sums.view(*by_unit.shape[:-1], 2 * NUM_REGIONS)

    def _mean_and_difference(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Turn [..., units] into the mean and the difference of each stratum, [..., strata]."""
        first, last = values[..., self._pairs[0]], values[..., self._pairs[1]]
        return (first + last) / 2, first - last

    def _corrected(self, mean: Tensor, difference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is left to estimate, and β times what is known, [Hq, G, 4].

        Args:
            mean: [Hq, G, strata].
            difference: likewise.
        """
        assert self._known is not None
        known_mean, known_difference, total = self._known
        rest_mean, rest_difference = mean.clone(), difference.clone()
        shift = mean.new_zeros(*mean.shape[:2], NUM_REGIONS)
        for fit, serves in self._sides:
            weighted = (known_difference * fit).transpose(1, 2)
            gram = known_difference @ weighted
            # Its ridge makes the matrix regular; asking CUDA whether it is would wait for it.
            right = (difference @ weighted).transpose(1, 2)
            slope = torch.linalg.solve_ex(_ridged(gram), right).result.transpose(1, 2)  # [Hq, G, K]
            rest_mean -= slope @ (known_mean * serves)
            rest_difference -= slope @ (known_difference * serves)
            shift += slope @ (total * serves @ self._in_region)
        return rest_mean, rest_difference, shift


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


class Accounts:
    """Collects rows on the device; one copy to the host at the end.

    Args:
        num_heads: query heads.
        num_rows: rows a head.
        n: real tokens.
        device: of the tensors that will be put in.
        sample: which rows were scored; None if all.
        first_head: global number of the first head, for errors.
    """

    def __init__(
        self,
        num_heads: int,
        num_rows: int,
        n: int,
        device: torch.device,
        *,
        sample: RowSample | None = None,
        first_head: int = 0,
    ) -> None:
        self.n = n
        self._sample = sample
        self._first_head = first_head
        self._values = torch.full(
            (num_heads, num_rows, _FIELDS), float("nan"), dtype=torch.float64, device=device
        )
        self._values[..., _COLUMNS] = 0

    def put(
        self,
        rows: Sequence[int],
        *,
        captured: Tensor,
        pairs: Tensor,
        tiles: Tensor,
        columns: Tensor | None = None,
        logical: Tensor | None = None,
    ) -> None:
        """Enter some rows.

        Args:
            rows: their places, G of them.
            captured: [Hq, G, 4], probability captured by the physical set, summed by region;
                [Hq, G, 8] with the variances of estimates.
            pairs: [Hq, G] or [G], causal pairs read.
            tiles: [Hq, G] or [G], causal tiles read.
            columns: [Hq, G], columns gathered; none if left out.
            logical: [Hq, G], probability captured by the logical set, summed over all rows; that
                of the physical set if left out.
        """
        at = upload(np.asarray(rows), self._values.device)
        values = torch.empty(
            self._values.shape[0], len(rows), _FIELDS, dtype=torch.float64, device=at.device
        )
        by_region = captured[..., :NUM_REGIONS].double()
        values[..., _CAPTURED] = by_region
        values[..., _VARIANCE] = captured[..., NUM_REGIONS:] if captured.shape[-1] > 4 else 0.0
        values[..., _LOGICAL] = by_region.sum(-1) if logical is None else logical.double()
        values[..., _PAIRS] = pairs.double()
        values[..., _TILES] = tiles.double()
        values[..., _COLUMNS] = 0 if columns is None else columns.double()
        self._values[:, at] = values

    def finish(
        self,
        specs: tuple[tuple[Candidate, Index], ...],
        total: Tensor,
        layer: int | None,
    ) -> LayerScores:
        """Copy to the host, check, and divide.

        Args:
            specs: what the rows are.
            total: [Hq], all probability of a head; n, if the activations are sound.
            layer: named in errors.

        Raises:
            ModelError: the probabilities of a head are not finite.
        """
        host = torch.cat([self._values.flatten(1), total.double()[:, None]], dim=1).cpu().numpy()
        total_host, values = host[:, -1], host[:, :-1].reshape(len(host), len(specs), _FIELDS)
        broken = np.flatnonzero(~np.isfinite(total_host))
        if broken.size:
            where = "" if layer is None else f"layer {layer}, "
            raise ModelError(
                f"{where}head {self._first_head + broken[0]}: the attention probabilities are not "
                f"finite ({broken.size} of {len(host)} heads of the layer): the model's "
                "activations overflow or its weights hold NaN; check the checkpoint, or load it in "
                "float32 or bfloat16"
            )
        assert np.all(np.abs(total_host - self.n) <= 1e-3 * self.n), "lse does not fit q and k"
        captured = values[..., _CAPTURED]
        rows = np.diff(np.asarray(region_bounds(self.n), dtype=np.float64))
        with np.errstate(invalid="ignore"):
            by_region = captured / rows
        mass = np.concatenate([captured.sum(-1, keepdims=True) / self.n, by_region], axis=-1)
        # An estimate may lie a little outside of what is possible.
        mass = _clamp(mass) if self._sample is None else np.clip(mass, 0.0, 1.0)
        logical = values[..., _LOGICAL] / self.n
        error, low = self._errors(mass, values[..., _VARIANCE], rows)
        return LayerScores(
            specs=specs,
            mass=mass,
            logical=np.clip(logical, 0.0, 1.0) if self._sample else _clamp(logical),
            density=values[..., _PAIRS] / causal_pairs(self.n),
            tiles=values[..., _TILES].astype(np.int64),
            columns=values[..., _COLUMNS].astype(np.int64),
            error=error,
            low=low,
        )

    def _errors(
        self, mass: NDArray[np.float64], variance: NDArray[np.float64], rows: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
        """Return standard errors and lower bounds (Student's t), [Hq, R, 5]."""
        if self._sample is None:
            return None, None
        with np.errstate(invalid="ignore"):
            by_region = np.sqrt(variance) / rows
        overall = np.sqrt(variance.sum(-1, keepdims=True)) / self.n
        error = np.concatenate([overall, by_region], axis=-1)
        free = self._sample.degrees_of_freedom
        free = np.concatenate([[free.sum()], free])
        quantile = np.where(free > 0, stdtrit(np.maximum(free, 1), _CONFIDENCE), 0.0)
        return error, np.clip(mass - quantile * error, 0.0, 1.0)


def _clamp(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    outside = np.nanmax(np.maximum(-mass, mass - 1.0), initial=0.0)
    assert outside <= _ROUNDING, f"captured mass is {outside} outside [0, 1]"
    return np.clip(mass, 0.0, 1.0)
