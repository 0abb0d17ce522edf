# SPDX-License-Identifier: Apache-2.0
"""Open the model of a calibration, alike in the process that leads and in its followers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from patternsearch.calibration.distributed import Team
from patternsearch.calibration.request import CalibrationRequest
from patternsearch.model.loading import OpenedModel, open_model
from patternsearch.model.placement import check_device

__all__ = ["import_model_library", "open_for_team"]


def import_model_library(device: str) -> None:
    """Import what every model needs of transformers, and wake the GPU meanwhile.

    Args:
        device: of this process.

    Raises:
        InputError, EnvironmentLacks: as :func:`patternsearch.model.placement.check_device`.
    """
    check_device(device)
    with _waking(device):
        import transformers.modeling_utils
        import transformers.models.auto.modeling_auto
        import transformers.models.auto.tokenization_auto  # noqa: F401


@contextmanager
def _waking(device: str) -> Iterator[None]:
    """Let a thread make the context of a GPU, unless it is a current one that has one."""
    is_current_one = device == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not device.startswith("cuda") or is_current_one:
        yield
        return
    # Not in the thread: this takes a lock of its own, and may import.
    torch.cuda.init()  # type: ignore[no-untyped-call]

    def wake() -> None:
        with suppress(Exception):  # whoever needs the GPU will say what is wrong with it
            x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
            torch.matmul(x, x).sum().item()

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


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
