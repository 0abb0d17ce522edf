# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: bars on a terminal, one line a minute elsewhere, JSON events on request."""

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

__all__ = ["Bars", "JsonEvents", "Lines", "progress_for"]

LINE_INTERVAL_S = 60.0


class _Display:
    """A context manager of which only the bars make use."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Bars(_Display):
    """Rich bars with ETA; a context manager that owns the live display."""

    def __init__(self, console: "Console") -> None:
        # Here, since every command's --help would wait for this import otherwise.
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def start(self, task: str, total: float, unit: str) -> None:
        """Show a bar for ``task``."""
        if task in self._tasks:
            self._bars.reset(self._tasks[task], total=total)
        else:
            self._tasks[task] = self._bars.add_task(task, total=total, note="")

    def advance(self, task: str, amount: float, note: str = "") -> None:
        """Move the bar; a new note replaces the old one."""
        fields: dict[str, Any] = {"note": note} if note else {}
        self._bars.update(self._tasks[task], advance=amount, **fields)

    def finish(self, task: str) -> None:
        """Fill the bar and clear its note."""
        identity = self._tasks[task]
        total = self._bars.tasks[self._bars.task_ids.index(identity)].total
        self._bars.update(identity, completed=total, note="")


class Lines(_Display):
    """One line when a task starts and ends, and one a minute between."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._state: dict[str, dict[str, float]] = {}

    def start(self, task: str, total: float, unit: str) -> None:
        """Note the start; nothing is printed for tasks shorter than a minute."""
        now = time.monotonic()
        self._state[task] = {"total": total, "done": 0.0, "start": now, "said": now}

    def advance(self, task: str, amount: float, note: str = "") -> None:
        """Print a line if the last one is a minute old."""
        state = self._state[task]
        state["done"] += amount
        now = time.monotonic()
        if now - state["said"] >= LINE_INTERVAL_S:
            state["said"] = now
            fraction = state["done"] / state["total"] if state["total"] else 1.0
            left = (now - state["start"]) * (1 - fraction) / fraction if fraction else 0.0
            self._console.print(
                f"{task}: {fraction:.0%}, about {left:.0f} s left {note}".rstrip(), markup=False
            )

    def finish(self, task: str) -> None:
        """Forget the task."""
        self._state.pop(task, None)


class JsonEvents(_Display):
    """One JSON object a line on stderr, for schedulers; ``advance`` at most once a second."""

    def __init__(self) -> None:
        self._state: dict[str, dict[str, float]] = {}

    def _emit(self, event: str, task: str, **values: Any) -> None:
        line = {"time": round(time.time(), 3), "event": event, "task": task, **values}
        sys.stderr.write(json.dumps(line) + "\n")
        sys.stderr.flush()

    def start(self, task: str, total: float, unit: str) -> None:
        """Emit ``start`` with the total and its unit."""
        self._state[task] = {"done": 0.0, "total": total, "said": 0.0}
        self._emit("start", task, total=total, unit=unit)

    def advance(self, task: str, amount: float, note: str = "") -> None:
        """Emit ``advance`` with the amount done so far, at most once a second."""
        state = self._state[task]
        state["done"] += amount
        now = time.monotonic()
        if now - state["said"] >= 1.0:
            state["said"] = now
            self._emit("advance", task, done=state["done"], total=state["total"], note=note)

    def finish(self, task: str) -> None:
        """Emit ``end``."""
        self._state.pop(task, None)
        self._emit("end", task)


def progress_for(console: "Console", *, log_json: bool = False) -> Bars | Lines | JsonEvents:
    """Return the progress that suits where stderr goes."""
    if log_json:
        return JsonEvents()
    return Bars(console) if console.is_terminal else Lines(console)
