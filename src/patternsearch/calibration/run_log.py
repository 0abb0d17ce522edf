# SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself in run.json: what it is of, how far it came, where time went."""

from dataclasses import dataclass
from typing import Any, Literal

from patternsearch.calibration.clock import PhaseClock
from patternsearch.calibration.store import ScoresStore

__all__ = ["RunLog"]


@dataclass(slots=True)
class RunLog:
    """Writes run.json as the run goes on.

    Attributes:
        store: of the run.
        clock: of this process.
        document: what is neither status nor time.
        earlier: seconds by phase of the processes that led the run before.
        dates: ``started`` and ``finished``, in seconds since 1970.
        status: ``running`` or ``complete``.
    """

    store: ScoresStore
    clock: PhaseClock
    document: dict[str, Any]
    earlier: dict[str, float]
    dates: dict[str, float | None]
    status: Literal["running", "complete"] = "running"

    def seconds(self) -> dict[str, float]:
        """Return wall time by phase."""
        return {
            name: self.earlier.get(name, 0.0) + self.clock.seconds.get(name, 0.0)
            for name in sorted(self.earlier.keys() | self.clock.seconds.keys())
        }

    def write(self) -> None:
        """Write run.json."""
        state = {"status": self.status, "timings": self.seconds(), "dates": self.dates}
        self.store.write_run({**self.document, **state})
