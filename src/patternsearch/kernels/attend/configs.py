# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the Triton attention, the fastest first; none of them changes the result."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["AttendConfig", "launch_configs"]


@dataclass(frozen=True, slots=True)
class AttendConfig:
    """How one launch is shaped.

    Attributes:
        block_k: keys per step through a key tile; divides the tile.
        block_c: gathered columns per step; divides ``COLUMN_PADDING``.
        num_warps: warps per program.
        num_stages: depth of the load pipeline.
        use_tma: load key tiles through tensor descriptors (Hopper and later).
    """

    block_k: int
    block_c: int
    num_warps: int
    num_stages: int
    use_tma: bool = False


def launch_configs(q: Tensor, k: Tensor, v: Tensor, tile: int) -> list[AttendConfig]:
    """Return the configurations to try for these inputs, in order."""
    wide = q.shape[-1] > 128
    if q.element_size() == 4:
        block = 16 if wide else 32
        return [AttendConfig(block, block, 8 if tile == 128 else 4, stages) for stages in (2, 1)]
    warps = 8 if tile == 128 else 4
    if wide:
        return [AttendConfig(b, b, warps, s) for b, s in ((64, 2), (32, 2), (32, 1), (16, 1))]
    return [AttendConfig(b, b, warps, s) for b, s in ((64, 2), (32, 2), (32, 1), (16, 1))]
