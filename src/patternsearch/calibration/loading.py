# SPDX-License-Identifier: Apache-2.0
"""Load the model of a calibration, alike in the process that leads and in its followers."""

from patternsearch.calibration.distributed import Team
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.model.loading import LoadedModel, load_model
from patternsearch.progress import Progress

__all__ = ["load_for_team"]


def load_for_team(
    request: CalibrationRequest, team: Team, *, leads: bool, progress: Progress | None = None
) -> LoadedModel:
    """Load this process's copy, or its tensor-parallel part of one.

    Args:
        request: what to calibrate.
        team: the processes of the run.
        leads: also take the tokenizer, and digest the weights for the config.
        progress: receives task ``load``.

    Raises:
        PatternsearchError: as :func:`patternsearch.model.loading.load_model`.
    """
    return load_model(
        request.model,
        device=team.device(request.device),
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        allow_pickle=request.allow_pickle,
        offline=request.offline,
        require_tokenizer=leads,
        digests=leads,
        tensor_parallel=team.tp_size,
        progress=progress,
    )
