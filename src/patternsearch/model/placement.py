# SPDX-License-Identifier: Apache-2.0
"""Which device a model goes to."""

import torch

from patternsearch.errors import EnvironmentLacks, InputError

__all__ = ["check_device"]


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
