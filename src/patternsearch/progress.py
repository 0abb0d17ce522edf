# SPDX-License-Identifier: Apache-2.0
"""How long work tells its caller how far it is; drawing bars is the command line's business."""

from typing import Protocol

__all__ = ["Progress", "Silent"]


class Progress(Protocol):
    """Receives the progress of named tasks. Calls come from one thread."""

    def start(self, task: str, total: float, unit: str) -> None:
        """Begin ``task`` of ``total`` units; starting a running task restarts it."""

    def advance(self, task: str, amount: float, note: str = "") -> None:
        """Add ``amount`` units done; ``note`` says what is being worked on."""

    def finish(self, task: str) -> None:
        """End ``task``."""


class Silent:
    """A progress that nobody watches."""

    def start(self, task: str, total: float, unit: str) -> None:
        """Ignore the start of a task."""

    def advance(self, task: str, amount: float, note: str = "") -> None:
        """Ignore the advance of a task."""

    def finish(self, task: str) -> None:
        """Ignore the end of a task."""
