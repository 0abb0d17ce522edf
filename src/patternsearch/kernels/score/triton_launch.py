# SPDX-License-Identifier: Apache-2.0
"""What all score kernels are launched with: operands, strides, and launch shapes that fit."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from patternsearch.errors import EnvironmentLacks
from patternsearch.kernels._common.checks import padded_head_dim
from patternsearch.patterns.geometry import num_tiles, query_segments

__all__ = ["ScoreLaunch", "ScoreOperands", "launch_first_that_fits", "score_launches"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoreLaunch:
    """Launch shape of the main score kernel.

    Attributes:
        block_keys: keys of a program, 64, 128 or 256.
        block_queries: queries of a score tile, 64 or 128.
        num_warps: warps of a program.
        num_stages: query tiles in flight.
        max_registers: registers a thread may use, so that two programs share a multiprocessor;
            None for no limit.
    """

    block_keys: int
    block_queries: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def score_launches(head_dim: int, dtype: torch.dtype) -> tuple[ScoreLaunch, ...]:
    """Return launch shapes to try, best first, for a head dimension and dtype."""
    dim = padded_head_dim(head_dim)
    if dtype == torch.float32:
        return (ScoreLaunch(64, 64, 4, 2), ScoreLaunch(64, 64, 4, 1))
    if dim <= 128:
        return (
            ScoreLaunch(256, 64, 8, 3, 128),
            ScoreLaunch(128, 64, 4, 3),
            ScoreLaunch(128, 64, 4, 2),
            ScoreLaunch(64, 64, 4, 1),
        )
    return (ScoreLaunch(128, 64, 4, 3), ScoreLaunch(128, 64, 4, 2), ScoreLaunch(64, 64, 4, 1))


def launch_first_that_fits(
    launches: Sequence[ScoreLaunch], start: Callable[[ScoreLaunch], None]
) -> ScoreLaunch:
    """Call ``start`` with each launch shape until one fits the device, and return that one.

    Raises:
        EnvironmentLacks: none fits; the message has the numbers.
    """
    refusals = []
    for launch in launches:
        try:
            start(launch)
        except OutOfResources as error:
            refusals.append(f"{launch.block_keys} keys, {launch.num_warps} warps: {error}")
            _LOG.info("score launch skipped: %s", refusals[-1])
        else:
            return launch
    raise EnvironmentLacks(
        "no launch shape of the score kernel fits this device; tried "
        + "; ".join(refusals)
        + ". Use the PyTorch backend or a larger GPU."
    )


@dataclass(frozen=True)
class ScoreOperands:
    """The inputs of one layer in the form the kernels take."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float

    @property
    def n(self) -> int:
        """Tokens."""
        return self.q.shape[2]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def scale_log2(self) -> float:
        """Factor of the logits in base 2."""
        return self.scale * math.log2(math.e)

    @cached_property
    def lse2(self) -> Tensor:
        """Row log-sum-exp in base 2, [Hq, 64·tiles], +inf in the padding."""
        rows = num_tiles(self.n, 64) * 64
        lse2 = self.lse.new_full((self.num_heads, rows), math.inf)
        torch.mul(self.lse, math.log2(math.e), out=lse2[:, : self.n])
        return lse2

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of q, then k, over head, token and dimension; then lse2's over the head."""
        return (*self.q.stride()[1:], *self.k.stride()[1:], self.lse2.stride(0))

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants that depend on the operands only."""
        dim = self.q.shape[3]
        precision = "ieee" if self.q.dtype == torch.float32 else "tf32"
        return {"HEAD_DIM": dim, "BLOCK_D": padded_head_dim(dim), "PRECISION": precision}

    @cached_property
    def segment_list(self) -> list[tuple[int, int, int]]:
        """(first row, row past the last, region) of each query segment."""
        bounds, region = query_segments(self.n, 64)
        return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), region.tolist(), strict=True))

    @property
    def num_segments(self) -> int:
        """Query segments of tiles of 64."""
        return len(self.segment_list)

    @cached_property
    def segments(self) -> Tensor:
        """``segment_list`` as int32 [segments, 3] on the device."""
        return torch.tensor(self.segment_list, dtype=torch.int32).to(self.q.device)

    @cached_property
    def first_segment(self) -> Tensor:
        """Index of each query tile's first segment, int32 [tiles + 1]; last: the number of all."""
        tile_of = torch.tensor([first // 64 for first, _, _ in self.segment_list])
        tiles = torch.arange(num_tiles(self.n, 64) + 1)
        return torch.searchsorted(tile_of, tiles).to(torch.int32).to(self.q.device)

    @cached_property
    def straddles(self) -> Tensor:
        """Segments that are not a whole tile of 64 rows, int32 [straddles, 4] on the device.

        First row, row past the last, region, segment index.
        """
        rows = [
            (first, end, region, index)
            for index, (first, end, region) in enumerate(self.segment_list)
            if end - first < 64
        ]
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(self.q.device)
