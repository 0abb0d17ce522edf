# SPDX-License-Identifier: Apache-2.0
"""What a page draws from a scores folder: every candidate of every head, and the frontier."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patternsearch.errors import InputError
from patternsearch.report.packing import finite, pack_fractions, pack_integers
from patternsearch.report.words import pattern_document
from patternsearch.schema.config import PatternConfig, Selection
from patternsearch.schema.scores import ScoresFolder
from patternsearch.selection.arrays import LengthScores
from patternsearch.selection.cost import CostModel
from patternsearch.selection.document import load_run_record
from patternsearch.selection.frontier import DEFAULT_TARGETS, frontier
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import Problem, pose

__all__ = ["MAX_CELLS", "ScoresView", "scores_view"]

MAX_CELLS = 400_000
"""Layers × heads × candidates × lengths that a page holds; above, only the longest length."""


@dataclass(frozen=True, slots=True)
class ScoresView:
    """The parts of a page that come from scores.

    Attributes:
        document: arrays and names for the script.
        notes: what a reader must know, one sentence each.
    """

    document: dict[str, Any]
    notes: tuple[str, ...]


def scores_view(config: PatternConfig, folder: Path, cost: CostModel | None) -> ScoresView:
    """Prepare a scores folder for the page of a config.

    Args:
        config: the config; it must have been selected from these scores.
        folder: the scores folder.
        cost: cost model of the time axis; None is counted work.

    Raises:
        ScoresError: the folder is bad.
        InputError: the scores are of another run than the config.
        TimingError: the cost model does not cover a length or candidate.
    """
    scores_folder = ScoresFolder(folder)
    _check_same_run(config, scores_folder)
    options = _options(config.selection)
    problem = pose(scores_folder, options, cost)
    curve = frontier(problem.scores, options, cost, _targets(options))
    notes = []
    cells = int(np.prod(problem.mass.shape)) * len(problem.tables)
    tables = problem.tables
    if cells > MAX_CELLS and len(tables) > 1:
        tables = tables[-1:]
        notes.append(
            f"The curves of single heads show {tables[0].statistics.length} tokens only: "
            f"{cells} cells for all lengths would make the page too large."
        )
    if config.selection is not None and config.selection.measured and cost is None:
        notes.append(
            "Candidates are compared by counted work: give the timing table that the selection "
            "used (--timings) to see their predicted times."
        )
    document = {
        "layers": list(problem.scores.layers),
        "lengths": [table.statistics.length for table in tables],
        "candidates": [pattern_document(c) for c in problem.scores.candidates],
        "unit": curve.unit,
        "measured": curve.measured,
        "device": curve.device,
        "mean": pack_fractions(np.stack([t.statistics.mean for t in tables])),
        "worst": pack_fractions(np.stack([t.statistics.worst_region for t in tables])),
        "density": pack_fractions(np.stack([t.statistics.density for t in tables])),
        "oracle": _oracle(tables),
        "cost": pack_fractions(np.stack([t.cost for t in tables]) / _scale(cost, tables)),
        "cost_scale": _scale(cost, tables),
        "reached": pack_fractions(problem.mass),
        "chosen": pack_integers(_places(config, problem)),
        "samples": _samples(problem.scores.lengths),
        "sample_mass": _sample_mass(config, problem),
        "frontier": [asdict(point) for point in curve.points],
        "estimators": [
            {k: finite(v) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in curve.estimators
        ],
        "estimator_target": curve.target_mass,
    }
    return ScoresView(document, tuple(notes))


def _check_same_run(config: PatternConfig, folder: ScoresFolder) -> None:
    if config.calibration is None:
        raise InputError(
            "this config was imported and has no scores: leave --scores out, or calibrate the model"
        )
    record = load_run_record(folder)
    if record.calibration != config.calibration or (
        record.model.weights_sha256 != config.model.weights_sha256
    ):
        raise InputError(
            f"{folder.root} holds the scores of another calibration than this config: give the "
            "folder that calibrate wrote beside it, or select a config from these scores"
        )


def _options(selection: Selection | None) -> SelectionOptions:
    """Return the options that repeat the config's rule, as a target to sweep."""
    if selection is None:
        return SelectionOptions()
    return SelectionOptions(
        target_mass=0.95 if selection.target_mass is None else selection.target_mass,
        statistic=selection.statistic,
        regions=selection.regions,
        kinds=selection.kinds,
        max_density=selection.max_density,
        dense_layers=selection.dense_layers,
    )


def _targets(options: SelectionOptions) -> tuple[float, ...]:
    assert options.target_mass is not None
    return tuple(sorted({*DEFAULT_TARGETS, options.target_mass}))


def _scale(cost: CostModel | None, tables: Any) -> float:
    """Return the largest known cost, so that costs travel as fractions of it."""
    largest = [t.cost[np.isfinite(t.cost)].max(initial=0.0) for t in tables]
    return float(max(largest)) or 1.0


def _oracle(tables: Any) -> dict[str, Any] | None:
    oracle = np.stack([table.statistics.oracle_mean for table in tables])
    return None if np.isnan(oracle).all() else pack_fractions(oracle)


def _places(config: PatternConfig, problem: Problem) -> NDArray[np.int64]:
    """Return the place of each head's pattern among the candidates, [L, H]; −1 if not there."""
    place = {candidate: i for i, candidate in enumerate(problem.scores.candidates)}
    return np.array(
        [
            [place.get(entry.pattern, -1) for entry in config.heads[layer] or ()]
            for layer in problem.scores.layers
        ],
        dtype=np.int64,
    )


def _samples(lengths: tuple[LengthScores, ...]) -> list[dict[str, Any]]:
    return [
        {
            "id": sample,
            "source": length.sources[i],
            "split": "heldout" if length.heldout[i] else "calibration",
            "length": length.length,
            "num_tokens": int(length.num_tokens[i]),
        }
        for length in lengths
        for i, sample in enumerate(length.sample_ids)
    ]


def _sample_mass(config: PatternConfig, problem: Problem) -> dict[str, Any]:
    """Pack the chosen pattern's mass on every sample, [S, L, H, 5] (all rows, then regions)."""
    places = np.maximum(_places(config, problem), 0)
    parts = []
    for length in problem.scores.lengths:
        index = places[None, None, :, :, None]
        picked = np.take_along_axis(length.mass, index, axis=-1)[..., 0]
        parts.append(np.moveaxis(picked, 0, -1))
    return pack_fractions(np.concatenate(parts))
