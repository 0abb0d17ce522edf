# SPDX-License-Identifier: Apache-2.0
"""The run loop: samples through the model, every layer scored as it passes, one part a sample.

The forward stays dense. Each full-attention layer hands its q and k to the scorer and is then
forgotten, so memory does not grow with depth. A finished sample is on disk before the next one
starts; a run that is cut short continues where it stopped and ends with the same files.
"""

import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from patternsearch._version import __version__
from patternsearch.calibration.estimate import WorkEstimate, sample_work
from patternsearch.calibration.lock import exclusive
from patternsearch.calibration.recipes import Recipe, load_recipe
from patternsearch.calibration.request import CalibrationRequest, score_request
from patternsearch.calibration.samples import Sample, draw_samples
from patternsearch.calibration.store import ScoresStore
from patternsearch.errors import InputError
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.loading import LoadedModel, load_model
from patternsearch.patterns.grids import Grid
from patternsearch.progress import Progress, Silent
from patternsearch.schema.config import Calibration, Fingerprints, Provenance, SampleRecord
from patternsearch.schema.io import load_grid
from patternsearch.schema.scores import ScoresFolder, scores_folder_of
from patternsearch.scoring.engine import LayerScorer, LayerScores
from patternsearch.scoring.table import sample_table

__all__ = ["CalibrationRun", "calibrate_scores"]

FINGERPRINT_SEED = 20260101


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What a finished run knows beside its scores folder.

    Attributes:
        folder: the scores.
        loaded: the model, still in memory.
        calibration: provenance for the config.
        provenance: versions for the config.
        fingerprints: of every full-attention head.
        seconds: wall time of each phase of this process; a resumed run counts only its own share.
        num_resumed: samples that an earlier run had finished.
    """

    folder: ScoresFolder
    loaded: LoadedModel
    calibration: Calibration
    provenance: Provenance
    fingerprints: Fingerprints
    seconds: dict[str, float]
    num_resumed: int


@dataclass
class _Clock:
    """Wall time by phase."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


def calibrate_scores(
    request: CalibrationRequest,
    *,
    progress: Progress | None = None,
    on_estimate: Any = None,
) -> CalibrationRun:
    """Score every sample of the recipe and return the finished run.

    Args:
        request: what to do.
        progress: receives the tasks ``digest``, ``samples`` and ``calibrate``.
        on_estimate: called once with a :class:`WorkEstimate` before the first sample.

    Raises:
        PatternsearchError: bad input or environment; what was finished stays on disk.
        KeyboardInterrupt: as it came; what was finished stays on disk.
    """
    progress = progress or Silent()
    folder = scores_folder_of(request.output)
    ScoresStore.refuse_foreign(folder)
    recipe = load_recipe(request.recipe)
    grid, grid_sha256 = load_grid(request.grid)
    lengths = request.lengths or recipe.lengths
    _check_lengths(lengths, grid, request.grid)
    _make_folder(folder)
    with exclusive(folder.root / ".lock"):
        return _run(
            request, recipe, grid, grid_sha256, tuple(lengths), folder, progress, on_estimate
        )


def _check_lengths(lengths: Sequence[int], grid: Grid, name: str) -> None:
    short = [length for length in lengths if length < grid.min_tokens]
    if short:
        raise InputError(
            f"length {short[0]} is below the {grid.min_tokens} tokens at which the budgets of grid "
            f"{name!r} begin to mean something: use longer samples or a smaller grid"
        )


def _make_folder(folder: ScoresFolder) -> None:
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder.root} cannot be made ({error.strerror}): choose an output you may write to"
        ) from None


def _check_positions(lengths: Sequence[int], loaded: LoadedModel, *, allowed: bool) -> bool:
    """Return whether any length is beyond the model's positions; refuse it unless allowed."""
    limit = loaded.identity.max_positions
    beyond = [length for length in lengths if limit is not None and length > limit]
    if beyond and not allowed:
        raise InputError(
            f"length {max(beyond)} is beyond the {limit} positions this model was made for: "
            "use shorter lengths, or pass --allow-extrapolation (it is recorded)"
        )
    return bool(beyond)


def _run(
    request: CalibrationRequest,
    recipe: Recipe,
    grid: Grid,
    grid_sha256: str,
    lengths: tuple[int, ...],
    folder: ScoresFolder,
    progress: Progress,
    on_estimate: Any,
) -> CalibrationRun:
    clock = _Clock()
    with clock.phase("load"):
        loaded = load_model(
            request.model,
            device=request.device,
            dtype=request.dtype,
            trust_remote_code=request.trust_remote_code,
            progress=progress,
        )
    extrapolated = _check_positions(lengths, loaded, allowed=request.allow_extrapolation)
    seed = recipe.seed if request.seed is None else request.seed
    backend = "triton" if loaded.device.type == "cuda" else "torch"
    with clock.phase("draw"):
        samples, recipe_sha256 = draw(request, recipe, lengths, seed, loaded, progress)
    store = ScoresStore(
        folder,
        score_request(
            request,
            identity=loaded.identity,
            dtype=loaded.identity.dtype,
            backend=backend,
            recipe_sha256=recipe_sha256,
            grid_sha256=grid_sha256,
            lengths=lengths,
            seed=seed,
        ),
    )
