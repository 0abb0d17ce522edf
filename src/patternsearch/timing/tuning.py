# SPDX-License-Identifier: Apache-2.0
"""Launch shapes of the sparse kernel, compared on this GPU: execution choices, not quality."""

from collections.abc import Collection, Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from patternsearch.errors import EnvironmentLacks
from patternsearch.patterns.candidates import BlockSparse, Candidate, Tile, VerticalSlashSpread
from patternsearch.patterns.geometry import num_tiles
from patternsearch.timing.cases import Plan
from patternsearch.timing.clocks import Clock
from patternsearch.timing.table import LaunchSetting
from patternsearch.timing.workload import Inputs, LayerKernels, device_limits, make_inputs

if TYPE_CHECKING:
    from patternsearch.kernels.attend import AttendPlan
    from patternsearch.kernels.attend.configs import AttendConfig

__all__ = ["tune"]

_BLOCKS = 32
_COLUMNS, _DIAGONALS = 1024, 16
_MAX_TOKENS = 16384
_TOLERANCE = 1e-2
"""Relative error within which two launch shapes agree; the first has passed the gate."""

_NOISE = 0.02
"""A launch shape must be faster by this much to replace the one that runs untuned."""


def tune(
    kernels: LayerKernels,
    clock: Clock,
    plan: Plan,
    head_dim: int,
    device: torch.device,
    known: Collection[tuple[int, int | None, bool]] = (),
) -> Iterator[list[LaunchSetting]]:
    """Time the launch shapes that fit, for both tile sizes, with gathered columns and without.

    A launch shape whose output differs from the first's is left out. Yields the settings of one
    class of launches at a time; the fastest of them is the one used, by the rest of the benchmark
    and, with the table, by the runtime. A quick plan times only what runs untuned. Nothing is
    yielded off the GPU.

    Args:
        kernels: build the workload's index.
        clock: what times a launch.
        plan: heads, dtype and lengths.
        head_dim: d.
        device: where to run.
        known: head_dim, tile and has_columns of classes that need no tuning.
    """
    if device.type != "cuda":
        return
    from patternsearch.kernels.attend.configs import tuning_configs

    dtype = getattr(torch, plan.dtype)
    n = min(_MAX_TOKENS, max(plan.lengths))
    heads = (plan.num_query_heads, plan.num_kv_heads)
    tiles: tuple[Tile, ...] = (64, 128)
    classes = [pair for pair in product(tiles, (False, True)) if (head_dim, *pair) not in known]
    if not classes:
        return
    inputs = make_inputs(n, head_dim, *heads, dtype, device)
    q, k, v = inputs[0]
    for tile, has_columns in classes:
        candidate = _workload(n, tile, has_columns)
        layer = kernels.plan([candidate] * plan.num_query_heads, q, k, head_dim**-0.5)
        configs = tuning_configs(q, k, v, tile, has_columns)
        # Loads without descriptors stand in where descriptors cannot be read; each launch shape
        # takes seconds to compile.
        configs = [config for config in configs if config.use_tma == configs[0].use_tma]
        times: dict[AttendConfig, float] = {}
        expected: Tensor | None = None
        for config in configs:
            run = partial(_launch, inputs, head_dim**-0.5, layer, config)
            try:
                with device_limits(device, str(config)):
                    out = run(0).float()
                    expected = out if expected is None else expected
                    if not (out - expected).norm() <= _TOLERANCE * expected.norm():
                        continue
                    timing = clock.measure(run)
            except EnvironmentLacks:
                continue
            times[config] = timing.p50_ms
            if plan.is_quick:
                break
        used = _fastest(times)
        yield [
            LaunchSetting(
                op="attend",
                backend=kernels.name,
                dtype=plan.dtype,
                head_dim=head_dim,
                tile=tile,
                has_columns=has_columns,
                values={name: v for name, v in asdict(config).items() if v is not None},
                p50_ms=p50_ms,
                is_used=config == used,
            )
            for config, p50_ms in times.items()
        ]


def _workload(n: int, tile: Tile, has_columns: bool) -> Candidate:
    count = num_tiles(n, tile)
    if not has_columns:
        return BlockSparse(blocks=min(_BLOCKS, count), tile=tile)
    return VerticalSlashSpread(
        vertical=min(_COLUMNS, n), diagonals=min(_DIAGONALS, count), tile=tile
    )


def _fastest(times: "dict[AttendConfig, float]") -> "AttendConfig | None":
    """Return the first, which runs untuned, unless another one is faster beyond noise."""
    if not times:
        return None
    first = next(iter(times))
    best = min(times, key=lambda config: times[config])
    return best if times[best] < (1 - _NOISE) * times[first] else first


def _launch(
    inputs: Inputs, scale: float, plan: "AttendPlan", config: "AttendConfig", repetition: int
) -> Tensor:
    from patternsearch.kernels.attend.triton import attend_triton

    return attend_triton(*inputs[repetition], scale=scale, plan=plan, config=config)[0]
