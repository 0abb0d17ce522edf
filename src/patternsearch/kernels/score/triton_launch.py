# SPDX-License-Identifier: Apache-2.0
"""What all score kernels are launched with: operands, strides, and launch shapes that fit."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from patternsearch.errors import EnvironmentLacks
from patternsearch.kernels._common.checks import padded_head_dim
from patternsearch.kernels._common.upload import upload
from patternsearch.patterns.geometry import num_tiles, query_segments

__all__ = [
    "ScoreLaunch",
    "ScoreOperands",
    "can_run_hopper",
    "launch_first_that_fits",
    "score_launches",
]

_LOG = logging.getLogger(__name__)


_FIRST_TRITON, _LAST_TRITON = (3, 6), (3, 9)
"""Releases that compile the Gluon kernel."""


@dataclass(frozen=True, slots=True)
class ScoreLaunch:
    """Kernel and launch shape of a score pass.

    Attributes:
        kernel: ``triton``: any device. ``hopper``: compute capability 9.0, half precision, a
            head_dim of 64 or 128, rows of unit stride that start at multiples of 16 bytes.
        block_keys: keys of a program, 64, 128 or 256; 256 for ``hopper``.
        num_warps: warps of a program.
        num_stages: query tiles in flight; 2 for ``hopper``.
        max_registers: registers a thread may use, so that two programs share a multiprocessor;
            None for no limit.
    """

    kernel: Literal["triton", "hopper"]
    block_keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def score_launches(q: Tensor, k: Tensor) -> tuple[ScoreLaunch, ...]:
    """Return the launch shapes to try on these inputs, best first (measured on an H200)."""
    if can_run_hopper(q, k):
        return (ScoreLaunch("hopper", 256, 4, 2), ScoreLaunch("triton", 256, 8, 3, 128))
    if q.dtype == torch.float32:
        return (ScoreLaunch("triton", 64, 4, 2), ScoreLaunch("triton", 64, 4, 1))
    if padded_head_dim(q.shape[3]) > 128:
        return (ScoreLaunch("triton", 128, 4, 2), ScoreLaunch("triton", 64, 4, 1))
    return (
        ScoreLaunch("triton", 256, 8, 3, 128),
        ScoreLaunch("triton", 128, 4, 2, 168),
        ScoreLaunch("triton", 64, 4, 1),
    )


def can_run_hopper(q: Tensor, k: Tensor) -> bool:
    """Return whether the ``hopper`` kernel can run these inputs on their device.

    Not under a Triton whose Gluon it was never compiled with: those names still change.
    """
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _FIRST_TRITON <= release <= _LAST_TRITON:
        return False
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[3] not in (64, 128):
        return False
    return all(
        x.stride(3) == 1
        and x.stride(1) % 8 == 0
        and x.stride(2) % 8 == 0
        and x.data_ptr() % 16 == 0
        for x in (q, k)
    )


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
            refusals.append(f"{launch}: {error}")
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
    def neg_lse2(self) -> Tensor:
        """Minus the row log-sum-exp in base 2, [Hq, 64·(tiles + 1)], −inf past the last row."""
        rows = (num_tiles(self.n, 64) + 1) * 64
        neg_lse2 = self.lse.new_full((self.num_heads, rows), -math.inf)
        torch.mul(self.lse, -math.log2(math.e), out=neg_lse2[:, : self.n])
        return neg_lse2

    @cached_property
    def lse2(self) -> Tensor:
        """Row log-sum-exp in base 2, [Hq, 64·(tiles + 1)], +inf past the last row."""
        return -self.neg_lse2

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of q, then k, over head, token and dimension; then neg_lse2's over the head."""
        return (*self.q.stride()[1:], *self.k.stride()[1:], self.neg_lse2.stride(0))

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
        return upload(np.asarray(self.segment_list, dtype=np.int32), self.q.device)

    @cached_property
    def first_segment(self) -> Tensor:
        """Index of each query tile's first segment, int32 [tiles + 1]; last: the number of all."""
        tile_of = [first // 64 for first, _, _ in self.segment_list]
        first = np.searchsorted(tile_of, np.arange(num_tiles(self.n, 64) + 1))
        return upload(first.astype(np.int32), self.q.device)

    @cached_property
    def edges(self) -> Tensor:
        """Segments that are not a whole tile of 64 rows, int32 [edges, 4] on the device.

        First row, row past the last, region, segment index.
        """
        rows = [
            (first, end, region, index)
            for index, (first, end, region) in enumerate(self.segment_list)
            if end - first < 64
        ]
        return upload(np.asarray(rows, dtype=np.int32).reshape(-1, 4), self.q.device)
