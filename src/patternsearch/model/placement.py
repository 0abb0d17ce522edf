# SPDX-License-Identifier: Apache-2.0
"""Which device a model goes to, and how it gets there."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from patternsearch.errors import EnvironmentLacks, InputError

__all__ = ["check_device", "move_model"]

_COPY_THREADS = 8


def check_device(device: str | torch.device) -> str:
    """Return the name of a device that exists.

    Raises:
        InputError: If it is no device.
        EnvironmentLacks: If this machine does not have it.
    """
    name = str(device)
    try:
        kind = "auto" if name == "auto" else torch.device(name).type
    except RuntimeError:
        raise InputError(f"{name!r} is no device; name cpu, cuda, cuda:1 or auto") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise EnvironmentLacks(f"no CUDA device is available for {name!r}; use the device cpu")
    if kind == "cuda" and (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise EnvironmentLacks(
            f"{name!r} does not exist; this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return name


def move_model(model: Any, device: torch.device) -> None:
    """Move a model to a device, its parameters by several threads.

    Parameters of a safetensors file are mapped into memory: copying them is what reads the file.
    """
    if device.type == "cuda":
        # Threads have a current device of their own.
        current = device.index if device.index is not None else torch.cuda.current_device()
        device = torch.device("cuda", current)
        with ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="copy") as pool:
            parameters = list(model.parameters())
            copies = pool.map(lambda parameter: parameter.data.to(device), parameters)
            for parameter, copied in zip(parameters, copies, strict=True):
                parameter.data = copied
    model.to(device)
