# SPDX-License-Identifier: Apache-2.0
"""Open the model of a calibration, alike in the process that leads and in its followers."""

from patternsearch.calibration.distributed import Team
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.model.loading import OpenedModel, open_model
from patternsearch.model.placement import check_device

__all__ = ["import_model_library", "open_for_team"]


def import_model_library(device: str) -> None:
    """Refuse a device that is not there, then import what every model needs of transformers.

    Args:
        device: of this process.

    Raises:
        InputError, EnvironmentLacks: as :func:`patternsearch.model.placement.check_device`.
    """
    check_device(device)
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto
    import transformers.models.auto.tokenization_auto  # noqa: F401


def open_for_team(request: CalibrationRequest, team: Team, *, leads: bool) -> OpenedModel:
    """Open this process's copy, or its tensor-parallel part of one.

    Args:
        request: what to calibrate.
        team: the processes of the run.
        leads: also take the tokenizer.

    Raises:
        PatternsearchError: as :func:`patternsearch.model.loading.open_model`.
    """
    return open_model(
        request.model,
        device=team.device(request.device),
        dtype=request.dtype,
        trust_remote_code=request.trust_remote_code,
        allow_pickle=request.allow_pickle,
        offline=request.offline,
        require_tokenizer=leads,
        tensor_parallel=team.tp_size,
    )
