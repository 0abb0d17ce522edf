# SPDX-License-Identifier: Apache-2.0
"""Which device work runs on by default, and what a GPU says about itself."""

import subprocess
from dataclasses import dataclass

from patternsearch.errors import EnvironmentLacks

__all__ = ["GpuState", "default_device", "gpu_state", "require_cuda"]


def default_device() -> str:
    """Return ``cuda`` if there is a GPU that torch can use, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_cuda(what: str) -> None:
    """Refuse work that only a GPU can do.

    Raises:
        EnvironmentLacks: torch sees no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentLacks(
            f"{what} needs a CUDA GPU and torch {torch.__version__} sees none: run it on the "
            f"machine that will serve the model, or use a table measured there (--timings)"
        )


@dataclass(frozen=True, slots=True)
class GpuState:
    """What ``nvidia-smi`` tells; None where it tells nothing."""

    driver: str | None
    sm_mhz: int | None
    memory_mhz: int | None


def gpu_state(index: int = 0) -> GpuState:
    """Ask the driver for its version and the current clocks of one of torch's GPUs.

    It is asked for by its UUID: the driver also counts GPUs that this process may not use.
    """
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None and (state := _ask(f"GPU-{uuid}")) is not None:
        return state
    return _ask(str(index)) or GpuState(None, None, None)


def _ask(name: str) -> GpuState | None:
    command = [
        "nvidia-smi",
        f"--id={name}",
        "--query-gpu=driver_version,clocks.sm,clocks.mem",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = [field.strip() for field in answer.stdout.strip().split(",")]
    if len(fields) != 3:
        return None
    clocks = [int(field) if field.isdecimal() else None for field in fields[1:]]
    return GpuState(fields[0] or None, clocks[0], clocks[1])
