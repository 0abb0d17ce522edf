# SPDX-License-Identifier: Apache-2.0
"""Small host tables on the device, without waiting for it."""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["head_index", "upload"]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy host numbers to the device without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=256)
def head_index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Return head numbers as an int32 tensor; the same tensor for the same heads."""
    return upload(np.asarray(heads, dtype=np.int32), device)
