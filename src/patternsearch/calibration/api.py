# SPDX-License-Identifier: Apache-2.0
"""Calibration as one call: score, select, write the config.

Importing this module does not load torch: calibrating does, on the clock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.distributed import Team, joined
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.errors import InputError
from patternsearch.progress import Progress
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import dump_config, is_config_file
from patternsearch.selection.document import select_config
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import SelectedHeads

if TYPE_CHECKING:
    from patternsearch.calibration.run import CalibrationRun

__all__ = ["CalibrationOutcome", "calibrate"]


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """What calibrate leaves behind.

    Attributes:
        config: the document.
        config_path: where it was written.
        run: the scores and what made them.
        selected: the selection with its costs.
    """

    config: PatternConfig
    config_path: Path
    run: "CalibrationRun"
    selected: SelectedHeads

    def as_document(self) -> dict[str, Any]:
        """Return the result for programs."""
        return {
            "config": str(self.config_path),
            "scores": str(self.run.folder.root),
            "num_samples": len(self.run.record.calibration.samples),
            "num_resumed": self.run.num_resumed,
            "seconds": self.run.seconds,
            "measured": self.config.selection.measured if self.config.selection else False,
            "unit": self.selected.unit,
            "dense_cost": self.selected.dense_cost,
            "cost": self.selected.cost,
        }


def calibrate(
    request: CalibrationRequest,
    options: SelectionOptions | None = None,
    *,
    timings: Path | None = None,
    serve_dtype: str | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    clock: PhaseClock | None = None,
) -> CalibrationOutcome | None:
    """Calibrate a model and write its config; the scores stay beside it.

    Started by torchrun, the processes share the work.

    Args:
        request: what to score.
        options: how to select; None is target 0.95 by the worst sample and region.
        timings: a timing table; None selects by counted work and says so.
        serve_dtype: torch dtype that will serve, to look up times; None is the checkpoint's.
        progress: receives progress.
        note: told one line each.
        clock: what passed since it was made belongs to the run; None begins now.

    Returns:
        The outcome; None on every process but the first.

    Raises:
        PatternsearchError: bad input or environment; finished samples stay on disk.
    """
    clock = clock or PhaseClock()
    with joined(request.tp_ranks, request.device) as team:
        if team.is_leader:
            return _lead(
                request,
                options or SelectionOptions(consumer=request.consumer),
                team,
                clock,
                timings=timings,
                serve_dtype=serve_dtype,
                progress=progress,
                note=note,
            )
        from patternsearch.calibration.follower import follow

        clock.started()
        follow(request, team, clock)
        return None


def _lead(
    request: CalibrationRequest,
    options: SelectionOptions,
    team: Team,
    clock: PhaseClock,
    *,
    timings: Path | None,
    serve_dtype: str | None,
    progress: Progress | None,
    note: Callable[[str], None] | None,
) -> CalibrationOutcome:
    from patternsearch.calibration.coverage import covering_time_model
    from patternsearch.calibration.run import calibrate_scores

    if request.output.exists() and not is_config_file(request.output):
        raise InputError(
            f"{request.output} exists and is no patternsearch config: choose another output"
        )
    cost = None
    if timings is not None:
        cost = covering_time_model(timings, request, options, serve_dtype)
    clock.started()
    run = calibrate_scores(request, team=team, clock=clock, progress=progress, note=note)
    with clock.phase("select"):
        result = select_config(run.folder, options, cost, run.record)
        dump_config(result.config, request.output)
    run.log.write()
    return CalibrationOutcome(result.config, request.output, run, result.selected)
