# SPDX-License-Identifier: Apache-2.0
"""Lay the rows of a scores table out as arrays, checking that all samples agree."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from patternsearch.errors import ScoresError
from patternsearch.patterns.candidates import Candidate, Dense, describe
from patternsearch.schema.scores import LOW_COLUMNS, MASS_COLUMNS
from patternsearch.selection.arrays import Floats, LengthScores, ScoreArrays
from patternsearch.selection.rows import (
    COUNT_COLUMNS,
    REDO,
    candidate_codes,
    check_values,
    float_column,
    is_oracle_row,
    some,
)

__all__ = ["Collector"]


@dataclass(slots=True)
class _Sample:
    """One sample's arrays, before stacking; the order of axis C is the collector's."""

    sample_id: str
    source: str
    split: str
    length: int
    num_tokens: int
    mass: Floats
    sure: Floats | None
    oracle: Floats
    counts: Floats


class Collector:
    """Takes chunks of rows, one or more whole samples each, and lays them out."""

    def __init__(self) -> None:
        self._candidates: dict[Candidate, int] = {}
        self._layers: NDArray[np.int64] | None = None
        self._num_heads = 0
        self._samples: dict[str, _Sample] = {}

    def sample_ids(self) -> set[str]:
        """Return the samples that have been added."""
        return set(self._samples)

    def add(self, frame: pd.DataFrame, where: str) -> None:
        """Lay out every sample of a chunk.

        Raises:
            ScoresError: rows are missing, repeated, foreign or out of range.
        """
        if frame.empty:
            raise ScoresError(f"{where} holds no rows: {REDO}")
        sample_codes, sample_ids = pd.factorize(frame["sample_id"])
        codes, candidates = candidate_codes(frame, where)
        values = {
            name: float_column(frame, name, where)
            for name in (*MASS_COLUMNS, *COUNT_COLUMNS, *LOW_COLUMNS)
            if name not in LOW_COLUMNS or name in frame
        }
        heads = {name: frame[name].to_numpy(dtype=np.int64) for name in ("layer", "head")}
        oracle = is_oracle_row(frame, where)
        order = np.argsort(sample_codes, kind="stable")
        bounds = np.searchsorted(sample_codes[order], np.arange(len(sample_ids) + 1))
        for place, sample_id in enumerate(sample_ids):
            rows = order[bounds[place] : bounds[place + 1]]
            sample = str(sample_id)
            if sample in self._samples:
                raise ScoresError(
                    f"sample {sample} appears in more than one part ({where}): each sample is one "
                    f"part; {REDO} with --fresh"
                )
            self._samples[sample] = self._lay_out(
                sample, frame.iloc[rows[0]], rows, codes, candidates, heads, oracle, values
            )

    def _lay_out(
        self,
        sample: str,
        first: "pd.Series[Any]",
        rows: NDArray[np.int64],
        codes: NDArray[np.int64],
        candidates: list[Candidate],
        heads: dict[str, NDArray[np.int64]],
        oracle: NDArray[np.bool_],
        values: dict[str, Floats],
    ) -> _Sample:
        layer, head = heads["layer"][rows], heads["head"][rows]
        place = self._agree(sample, codes[rows], candidates, layer, head)
        assert self._layers is not None
        shape = (len(self._layers), self._num_heads, len(self._candidates))
        cell = np.ravel_multi_index(
            (np.searchsorted(self._layers, layer), head, place[codes[rows]]), shape
        )
        is_oracle = oracle[rows]
        self._check_complete(sample, cell[~is_oracle], shape)
        selectable, informing = rows[~is_oracle], rows[is_oracle]

        def masses(names: tuple[str, ...]) -> Floats:
            mass = np.full((len(names), *shape), np.nan)
            for axis, name in enumerate(names):
                mass[axis].reshape(-1)[cell[~is_oracle]] = values[name][selectable]
            return mass

        mass = masses(MASS_COLUMNS)
        sure = masses(LOW_COLUMNS) if LOW_COLUMNS[0] in values else None
        counts = np.empty((len(COUNT_COLUMNS), *shape))
        for axis, name in enumerate(COUNT_COLUMNS):
            counts[axis].reshape(-1)[cell[~is_oracle]] = values[name][selectable]
        oracle_mass = np.full(shape, np.nan)
        oracle_mass.reshape(-1)[cell[is_oracle]] = values["mass_physical"][informing]
        check_values(sample, mass, counts)
        if first["split"] not in ("calibration", "heldout"):
            raise ScoresError(
                f"sample {sample} has split {first['split']!r}: it must be calibration or heldout"
            )
        return _Sample(
            sample_id=sample,
            source=str(first["source"]),
            split=str(first["split"]),
            length=int(first["length"]),
            num_tokens=int(first["num_tokens"]),
            mass=np.clip(mass, 0.0, 1.0),
            sure=None if sure is None else np.clip(sure, 0.0, 1.0),
            oracle=np.clip(oracle_mass, 0.0, 1.0),
            counts=counts,
        )

    def _agree(
        self,
        sample: str,
        codes: NDArray[np.int64],
        candidates: list[Candidate],
        layer: NDArray[np.int64],
        head: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Hold every sample to the first one's layers, heads and candidates.

        Returns:
            For each candidate of the chunk its place on axis C (−1 where this sample lacks it).
        """
        present = np.unique(codes)
        if self._layers is None:
            first_row = np.full(len(candidates), len(codes))
            np.minimum.at(first_row, codes, np.arange(len(codes)))
            for code in present[np.argsort(first_row[present], kind="stable")]:
                self._candidates[candidates[code]] = len(self._candidates)
            if Dense() not in self._candidates:
                raise ScoresError(
                    f"sample {sample} has no rows of the dense candidate: dense is always scored; "
                    f"{REDO}"
                )
            self._layers, self._num_heads = np.unique(layer), int(head.max()) + 1
        mine = {candidates[code] for code in present}
        odd = [c for c in self._candidates if c not in mine]
        odd += [c for c in mine if c not in self._candidates]
        if odd:
            raise ScoresError(
                f"sample {sample} was scored on other candidates than the first sample "
                f"({some([describe(c) for c in odd])}): all samples must share one grid; "
                f"{REDO} with --fresh"
            )
        if not np.array_equal(np.unique(layer), self._layers):
            raise ScoresError(
                f"sample {sample} was scored on other layers than the first sample: {REDO} "
                f"with --fresh"
            )
        if head.min() < 0 or head.max() >= self._num_heads:
            raise ScoresError(
                f"sample {sample} has head {int(head.max())}, the first sample has heads "
                f"0..{self._num_heads - 1}: {REDO} with --fresh"
            )
        return np.array([self._candidates.get(c, -1) for c in candidates], dtype=np.int64)

    def _check_complete(self, sample: str, cell: NDArray[np.int64], shape: tuple[int, ...]) -> None:
        seen = np.bincount(cell, minlength=int(np.prod(shape)))
        if (seen == 1).all():
            return
        layer, head, code = np.unravel_index(int(np.argmax(seen != 1)), shape)
        assert self._layers is not None
        candidate = list(self._candidates)[int(code)]
        raise ScoresError(
            f"sample {sample} has {int(seen[seen != 1][0])} selectable rows for layer "
            f"{int(self._layers[layer])} head {int(head)} {describe(candidate)}: every head needs "
            f"exactly one; {REDO} with --fresh"
        )

    def finish(self) -> ScoreArrays:
        """Stack the samples by length; the collector is empty afterwards."""
        assert self._layers is not None
        lengths = sorted({sample.length for sample in self._samples.values()})
        return ScoreArrays(
            candidates=tuple(self._candidates),
            layers=tuple(int(layer) for layer in self._layers),
            num_heads=self._num_heads,
            lengths=tuple(self._stack(length) for length in lengths),
        )

    def _stack(self, length: int) -> LengthScores:
        samples = list(self._of_length(length))
        heldout = np.array([sample.split == "heldout" for sample in samples])
        if heldout.all():
            raise ScoresError(
                f"length {length} has held-out samples only: selection needs at least one "
                f"calibration sample at every length; add samples or lower the held-out fraction"
            )
        counts = np.stack([sample.counts for sample in samples], axis=1)
        mass = np.stack([sample.mass for sample in samples], axis=1)
        sure = mass
        if any(sample.sure is not None for sample in samples):
            sure = np.stack([s.mass if s.sure is None else s.sure for s in samples], axis=1)
        return LengthScores(
            length=length,
            sample_ids=tuple(sample.sample_id for sample in samples),
            sources=tuple(sample.source for sample in samples),
            heldout=heldout,
            num_tokens=np.array([sample.num_tokens for sample in samples], dtype=np.int64),
            mass=mass,
            sure=sure,
            oracle=np.stack([sample.oracle for sample in samples]),
            density=counts[0],
            tiles=counts[1],
            columns=counts[2],
        )

    def _of_length(self, length: int) -> Iterator[_Sample]:
        """Hand the samples of one length out, so that stacking holds one length twice at most."""
        for sample_id in [s.sample_id for s in self._samples.values() if s.length == length]:
            yield self._samples.pop(sample_id)
