# SPDX-License-Identifier: Apache-2.0
"""Where a forward's time goes: named phases, by CUDA events or by wall time."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["NoPhases", "PhaseTimer", "Phases"]


class Phases(Protocol):
    """Told where a phase begins and ends; phases of one name add up and do not nest."""

    def phase(self, name: str) -> Any:
        """Return a context manager around one run of a phase."""


class NoPhases:
    """Measures nothing."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the phase."""
        yield


class PhaseTimer:
    """Adds up the time of each phase.

    On CUDA it records events and never makes the host wait; read :meth:`milliseconds` when the
    work is over.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, Any, Any]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one run of a phase."""
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            try:
                yield
            finally:
                last.record()
                self._events.append((name, first, last))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each phase so far; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            for name, first, last in self._events:
                self._seconds[name] += first.elapsed_time(last) * 1e-3
            self._events.clear()
        return {name: seconds * 1e3 for name, seconds in self._seconds.items()}
