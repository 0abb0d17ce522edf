# SPDX-License-Identifier: Apache-2.0
"""Timing one call: warm-up, repetitions, percentiles; on the GPU with events, else by wall time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = ["Clock", "CudaClock", "Timing", "WallClock"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Percentiles of the repetitions, milliseconds."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repetitions: int


class Clock(Protocol):
    """Measures calls."""

    def measure(self, call: Callable[[int], object]) -> Timing:
        """Time ``call(i)``, i the number of the repetition, so that it can rotate its inputs."""


@dataclass(frozen=True, slots=True)
class CudaClock:
    """CUDA events around each call; the host does not wait between calls.

    Attributes:
        warm_up: calls before the first timed one; the first compiles.
        budget_ms: time to spend on repetitions.
        least: repetitions at least.
        most: repetitions at most.
    """

    warm_up: int = 3
    budget_ms: float = 60.0
    least: int = 5
    most: int = 60

    def measure(self, call: Callable[[int], object]) -> Timing:
        """Time a call; see :class:`Clock`."""
        import torch

        for repetition in range(self.warm_up):
            call(repetition)
        estimate = self._events(call, 2)
        count = int(np.clip(self.budget_ms / max(float(np.min(estimate)), 1e-3), self.least,
                            self.most))  # fmt: skip
        times = self._events(call, count)
        torch.cuda.synchronize()
        return _timing(times)

    @staticmethod
    def _events(call: Callable[[int], object], count: int) -> list[float]:
        import torch

        pairs = []
        for repetition in range(count):
            start, end = (_event() for _ in range(2))
            start.record()
            call(repetition)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairs]


@dataclass(frozen=True, slots=True)
class WallClock:
    """Wall time of synchronous calls."""

    warm_up: int = 1
    repetitions: int = 3

    def measure(self, call: Callable[[int], object]) -> Timing:
        """Time a call; see :class:`Clock`."""
        for repetition in range(self.warm_up):
            call(repetition)
        times = []
        for repetition in range(self.repetitions):
            start = time.perf_counter()
            call(repetition)
            times.append((time.perf_counter() - start) * 1e3)
        return _timing(times)


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _timing(times: list[float]) -> Timing:
    p20, p50, p80 = (round(float(value), 6) for value in np.percentile(times, (20, 50, 80)))
    return Timing(p20, p50, p80, len(times))
