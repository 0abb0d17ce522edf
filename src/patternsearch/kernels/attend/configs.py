# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the Triton attention, the fastest first; none of them changes the result."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "AttendConfig",
    "LaunchClass",
    "LaunchTuning",
    "has_descriptors",
    "launch_configs",
    "tuning_configs",
]


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """How one launch is shaped.

    Attributes:
        block_k: keys per step through a key tile; divides the tile.
        block_c: gathered columns per step; divides ``COLUMN_PADDING``.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        use_tma: load queries and key tiles through tensor descriptors (Hopper and later).
        max_registers: cap per thread, so that more programs share a multiprocessor; None: the
            compiler's choice.
    """

    block_k: int
    block_c: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchClass:
    """Launches that share a configuration.

    Attributes:
        dtype: torch name, such as ``bfloat16``.
        head_dim: d.
        tile: T.
        has_columns: does any head of the launch gather columns.
    """

    dtype: str
    head_dim: int
    tile: int
    has_columns: bool


LaunchTuning = Mapping[LaunchClass, AttendConfig]
"""The configuration that a GPU was measured to run fastest, by class; see ``timing.execution``."""


def launch_configs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: int,
    has_columns: bool,
    tuning: LaunchTuning | None = None,
) -> list[AttendConfig]:
    """Return the configurations to try for these inputs, in order.

    The first that fits the device's shared memory is used. What ``tuning`` names for this class
    comes first, unless the tensors cannot be read the way it wants.
    """
    known = _known_configs(q, k, v, tile, has_columns)
    shape = LaunchClass(str(q.dtype).removeprefix("torch."), q.shape[-1], tile, has_columns)
    tuned = (tuning or {}).get(shape)
    if tuned is None or (tuned.use_tma and not has_descriptors(q, k, v)):
        return known
    return [tuned, *(config for config in known if config != tuned)]


def tuning_configs(
    q: Tensor, k: Tensor, v: Tensor, tile: int, has_columns: bool
) -> list[AttendConfig]:
    """Return the configurations worth comparing on a GPU, the one that runs untuned first."""
    known = _known_configs(q, k, v, tile, has_columns)
    best = known[0]
    stages = [replace(best, num_stages=s) for s in (1, 2, 3) if s != best.num_stages]
    wider = [replace(best, num_warps=8, max_registers=None)] if tile == 128 else []
    found = [best, *stages, *wider, known[1]]
    return list(dict.fromkeys(found))


def _known_configs(
    q: Tensor, k: Tensor, v: Tensor, tile: int, has_columns: bool
) -> list[AttendConfig]:
    wide = q.shape[-1] > 128
    warps = 8 if wide and tile == 128 else 4
    if q.element_size() == 4:
        warps = 8 if tile == 128 else 4
        blocks = (16,) if wide else (32, 16)
        return [AttendConfig(b, b, warps, stages) for b in blocks for stages in (2, 1)]
    smaller = [AttendConfig(b, b, warps, s) for b, s in ((64, 2), (32, 2), (32, 1), (16, 1))]
    if not has_descriptors(q, k, v):
        return smaller
    if wide:
        best = AttendConfig(64, 64, warps, 2, use_tma=True)
    elif tile == 128:
        best = AttendConfig(64, 64, 4, 2, use_tma=True)
    else:
        cap = None if has_columns else 128
        best = AttendConfig(64, 64, 4, 1, use_tma=True, max_registers=cap)
    return [best, *smaller]


def has_descriptors(*tensors: Tensor) -> bool:
    """Say whether the device and these [1, heads, n, d] tensors can be read by tensor descriptors.

    They need a GPU of compute capability 9 or later, contiguous rows, and 16-byte alignment.
    """
    if tensors[0].device.type != "cuda" or torch.cuda.get_device_capability()[0] < 9:
        return False
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[1:-1])
        for x in tensors
    )
