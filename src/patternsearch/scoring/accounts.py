# SPDX-License-Identifier: Apache-2.0
"""What evaluation collects for each candidate, on the device, and the result it becomes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import stdtrit
from torch import Tensor

from patternsearch.errors import ModelError
from patternsearch.kernels._common.upload import upload
from patternsearch.patterns.candidates import Candidate, Index
from patternsearch.patterns.geometry import NUM_REGIONS, causal_pairs, region_bounds
from patternsearch.patterns.row_sampling import RowSample

__all__ = ["Accounts", "LayerScores", "joined_heads"]

_ROUNDING = 1e-4
"""How far float32 sums of probabilities may carry a mass outside [0, 1]; more is a fault."""

_ALLOWANCE = 1e-4
"""Taken off the lower bounds of a sample: products in bfloat16 round by as much, and where standard
errors are that small Student's t alone holds too seldom."""

_CAPTURED = slice(0, NUM_REGIONS)
_LOGICAL, _PAIRS, _TILES, _COLUMNS = range(NUM_REGIONS, NUM_REGIONS + 4)
_VARIANCE = slice(NUM_REGIONS + 4, 2 * NUM_REGIONS + 4)
_FIELDS = 2 * NUM_REGIONS + 4
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
        """Return standard errors and lower bounds (Student's t, and rounding), [Hq, R, 5]."""
        if self._sample is None:
            return None, None
        with np.errstate(invalid="ignore"):
            by_region = np.sqrt(variance) / rows
        overall = np.sqrt(variance.sum(-1, keepdims=True)) / self.n
        error = np.concatenate([overall, by_region], axis=-1)
        free = self._sample.degrees_of_freedom
        free = np.concatenate([[free.sum()], free])
        below = stdtrit(np.maximum(free, 1), _CONFIDENCE) * error + _ALLOWANCE
        return error, np.clip(mass - np.where(free > 0, below, 0.0), 0.0, 1.0)


def _clamp(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    outside = np.nanmax(np.maximum(-mass, mass - 1.0), initial=0.0)
    assert outside <= _ROUNDING, f"captured mass is {outside} outside [0, 1]"
    return np.clip(mass, 0.0, 1.0)
