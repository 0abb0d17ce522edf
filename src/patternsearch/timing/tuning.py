# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the sparse kernel, compared on this GPU: execution choices, not quality."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from patternsearch.errors import EnvironmentLacks
from patternsearch.patterns.candidates import BlockSparse, Tile
from patternsearch.patterns.geometry import num_tiles
from patternsearch.timing.cases import Plan
from patternsearch.timing.clocks import Clock
from patternsearch.timing.table import LaunchSetting
from patternsearch.timing.workload import Inputs, LayerKernels, make_inputs

if TYPE_CHECKING:
    from patternsearch.kernels.attend import AttendPlan
    from patternsearch.kernels.attend.configs import AttendConfig

__all__ = ["tune"]

_BLOCKS = 32
_MAX_TOKENS = 16384


def tune(
    kernels: LayerKernels, clock: Clock, plan: Plan, head_dim: int, device: torch.device
) -> Iterator[LaunchSetting]:
    """Time each launch shape that fits on scattered tiles, for both tile sizes.

    The first one that fits is what :func:`patternsearch.kernels.attend.attend` runs, and so what
    the table's rows are measured with; the others show what the choice is worth. Nothing is
    yielded off the GPU.
    """
    if device.type != "cuda":
        return
    from patternsearch.kernels.attend.configs import launch_configs

    dtype = getattr(torch, plan.dtype)
    n = min(_MAX_TOKENS, max(plan.lengths))
    heads = (plan.num_query_heads, plan.num_kv_heads)
    inputs = make_inputs(n, head_dim, *heads, dtype, device)
    tiles: tuple[Tile, ...] = (64, 128)
    for tile in tiles:
        candidate = BlockSparse(blocks=min(_BLOCKS, num_tiles(n, tile)), tile=tile)
        q, k, v = inputs[0]
        layer = kernels.plan([candidate] * plan.num_query_heads, q, k, head_dim**-0.5)
        is_first = True
        for config in launch_configs(q, k, v, tile, has_columns=False):
            try:
                timing = clock.measure(partial(_launch, inputs, head_dim**-0.5, layer, config))
            except EnvironmentLacks:
                continue
            yield LaunchSetting(
                op="attend",
                backend=kernels.name,
                dtype=plan.dtype,
                head_dim=head_dim,
                tile=tile,
                values={name: v for name, v in asdict(config).items() if v is not None},
                p50_ms=timing.p50_ms,
                is_used=is_first,
            )
            is_first = False


def _launch(
    inputs: Inputs, scale: float, plan: "AttendPlan", config: "AttendConfig", repetition: int
) -> None:
    from patternsearch.kernels.attend.triton import attend_triton

    attend_triton(*inputs[repetition], scale=scale, plan=plan, config=config)
