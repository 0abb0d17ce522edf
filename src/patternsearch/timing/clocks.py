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
    """Percentiles of the repetitions, milliseconds.

    Attributes:
        p20_ms: a fifth of the repetitions took at most this.
        p50_ms: the median.
        p80_ms: four fifths took at most this.
        repetitions: how many there were.
        host_ms: median time that the host needed to launch a call; None where the call itself is
            what the host does.
    """

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repetitions: int
    host_ms: float | None = None


class Clock(Protocol):
    """Measures calls."""

    def measure(self, call: Callable[[int], object]) -> Timing:
        """Time ``call(i)``, i the number of the repetition, so that it can rotate its inputs."""


@dataclass(frozen=True, slots=True)
class CudaClock:
    """CUDA events around each call, launched while the GPU is kept busy.

    In a model the host runs ahead of the GPU, so what a layer costs is the GPU's time and not the
    host's. Each repetition therefore waits behind a spinning kernel until the host has launched
    all of it. What the launches take is measured beside it.

    Attributes:
        budget_ms: time to spend on repetitions.
        least: repetitions at least, of calls shorter than ``long_ms``.
        most: repetitions at most.
        long_ms: calls as long as this are repeated three times.
    """

    budget_ms: float = 40.0
    least: int = 5
    most: int = 40
    long_ms: float = 50.0

    def measure(self, call: Callable[[int], object]) -> Timing:
        """Time a call; see :class:`Clock`."""
        import torch

        call(0)  # compiles
        torch.cuda.synchronize()
        trial = [self._once(call, repetition, 0.0) for repetition in range(2)]
        device_ms, host_ms = (min(values) for values in zip(*trial, strict=True))
        lead_ms = min(_LEAD * host_ms + 0.05, _MAX_LEAD_MS)
        if device_ms >= self.long_ms:
            count = 3
        else:
            whole = max(device_ms, host_ms) + lead_ms
            count = int(np.clip(self.budget_ms / whole, self.least, self.most))
        device, host = zip(
            *(self._once(call, repetition, lead_ms) for repetition in range(count)), strict=True
        )
        return _timing(list(device), host_ms=round(float(np.median(host)), 6))

    @staticmethod
    def _once(
        call: Callable[[int], object], repetition: int, lead_ms: float
    ) -> tuple[float, float]:
        """Return milliseconds of the device, behind a kernel of ``lead_ms``, and of the host."""
        import torch

        start, end = (_event() for _ in range(2))
        if lead_ms:
            torch.cuda._sleep(int(lead_ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        start.record()
        call(repetition)
        end.record()
        host_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)), host_ms


_LEAD = 1.3
"""The GPU is kept busy for this many times what the host needs."""

_MAX_LEAD_MS = 50.0
_CYCLES_PER_MS = 2.1e6
"""Above any current GPU's clock, so that the wait is not too short."""


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


def _timing(times: list[float], host_ms: float | None = None) -> Timing:
    p20, p50, p80 = (round(float(value), 6) for value in np.percentile(times, (20, 50, 80)))
    return Timing(p20, p50, p80, len(times), host_ms)
