# SPDX-License-Identifier: Apache-2.0
"""Wall time by phase, with the device drained at each bound so that work is booked where it ran."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PhaseClock"]


class PhaseClock:
    """Sums seconds by phase name.

    A phase inside another is taken out of the outer one, so the phases add up to the time that
    was clocked. Importing this module does not load torch, so that a clock can tell how long that
    takes.

    Args:
        device: a CUDA device is synchronised at each bound; None for the CPU.
    """

    def __init__(self, device: "torch.device | None" = None) -> None:
        self.device = device
        self._made = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def _now(self) -> float:
        if self.device is not None and self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def started(self) -> None:
        """Book the time since the clock was made under ``start``."""
        self.seconds["start"] += time.perf_counter() - self._made

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of the body under ``name``."""
        start = self._now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._now() - start
            inner = self._inner.pop()
            self.seconds[name] += spent - inner
            if self._inner:
                self._inner[-1] += spent
