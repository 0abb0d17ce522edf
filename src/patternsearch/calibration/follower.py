# SPDX-License-Identifier: Apache-2.0
"""What the processes beside the leader do: load the model, score their share, say nothing."""

from typing import Any

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.distributed import Team
from patternsearch.calibration.loading import import_model_library, open_for_team
from patternsearch.calibration.loop import Meter, rank_report, score_share
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.calibration.shares import share_of
from patternsearch.calibration.store import ScoresStore
from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.patterns.grids import Grid
from patternsearch.progress import Silent
from patternsearch.schema.scores import scores_folder_of
from patternsearch.scoring.engine import LayerScorer

__all__ = ["follow"]


def follow(request: CalibrationRequest, team: Team, clock: PhaseClock) -> None:
    """Take part in the run of the leader.

    The scores folder must be on a file system that all processes share: the samples are read
    from it, and the parts are written to it.

    Args:
        request: the arguments that the leader has too.
        team: the processes of the run.
        clock: gets the phases of this process.

    Raises:
        PeerError: another process stopped with an error.
        PatternsearchError: this one did.
    """
    team.share("checked")
    with clock.phase("start"):
        import_model_library(team.device(request.device))
    with clock.phase("load"):
        loaded = open_for_team(request, team, leads=False).load(digests=False)
    clock.device = loaded.device
    plan: dict[str, Any] = team.share("plan")
    scorer = LayerScorer(
        Grid.model_validate(plan["grid"]).expand(),
        oracle=request.oracle,
        consumer=request.consumer,
        backend=plan["backend"],
        row_sample=request.row_sample,
        row_seed=plan["row_seed"],
    )
    store = ScoresStore(scores_folder_of(request.output), plan["request"])
    samples = store.read_samples()
    if team.copy == 0:  # the leader's copy of the model: its ranks run in step
        with clock.phase("fingerprint"):
            fingerprint_heads(loaded, seed=plan["fingerprint_seed"])
    share = share_of(plan["order"], team.copy, team.num_copies)
    score_share(
        samples,
        share,
        store=store,
        loaded=loaded,
        scorer=scorer,
        clock=clock,
        meter=Meter(team, loaded, Silent(), 0.0),
    )
    team.finish(rank_report(loaded, clock, share))
