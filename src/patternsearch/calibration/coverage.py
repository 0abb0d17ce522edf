# SPDX-License-Identifier: Apache-2.0
"""Whether a timing table can price a calibration, asked before the model runs and not after."""

from pathlib import Path

from patternsearch.calibration.plan import resolve
from patternsearch.calibration.recipes import load_recipe
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.model.identity import describe_model
from patternsearch.patterns.candidates import Dense
from patternsearch.schema.io import load_grid
from patternsearch.selection.options import SelectionOptions
from patternsearch.timing.model import TimeModel, load_time_model

__all__ = ["covering_time_model"]


def covering_time_model(
    timings: Path,
    request: CalibrationRequest,
    options: SelectionOptions,
    serve_dtype: str | None = None,
) -> TimeModel:
    """Load a timing table and see that it covers everything that this calibration will price.

    Only the model's description is read, no weights.

    Args:
        timings: the table.
        request: gives model, recipe, lengths and grid.
        options: which of the grid's candidates may be chosen.
        serve_dtype: torch dtype that will serve; None is the checkpoint's.

    Raises:
        TimingError: the table is invalid, or was not measured for the model's dtype and head_dim,
            one of the lengths, or one of the candidates.
        PatternsearchError: the model, the recipe or the grid cannot be read.
    """
    recipe = load_recipe(request.recipe)
    resolved = resolve(recipe, lengths=request.lengths, samples=request.samples, seed=request.seed)
    grid, _ = load_grid(request.grid)
    identity = describe_model(
        request.model,
        weights=False,
        allow_pickle=request.allow_pickle,
        trust_remote_code=request.trust_remote_code,
        offline=request.offline,
    )
    model = load_time_model(
        timings, dtype=serve_dtype or identity.dtype, head_dim=identity.head_dim
    )
    candidates = dict.fromkeys((Dense(), *filter(options.allows, grid.expand())))
    model.require(tuple(candidates), [counts.tokens for counts in resolved.lengths])
    return model
