# SPDX-License-Identifier: Apache-2.0
"""Work beside the caller's: reading, hashing and tokenizing release the interpreter's lock."""

import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from patternsearch.progress import Progress, Silent

__all__ = ["Background"]

T = TypeVar("T")


class _Stopped(Exception):
    """Nobody waits for the result any more."""


class Background(Generic[T]):
    """A function that runs in a thread of its own; leaving the context abandons it.

    The thread ends at the function's next word of progress, and never keeps the process alive.

    Args:
        work: gets where to tell its progress.
        progress: is told, from the thread; None tells nobody.
    """

    def __init__(self, work: Callable[[Progress], T], progress: Progress | None = None) -> None:
        self._work = work
        self._progress = progress or Silent()
        self._is_stopped = False
        self._result: T
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._work(_Watched(self))
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopped = True

    def result(self) -> T:
        """Wait for the function; return or raise what it did."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def tell(self) -> Progress:
        """Return whom the function tells, unless it is abandoned."""
        if self._is_stopped:
            raise _Stopped
        return self._progress


class _Watched:
    """Passes progress on."""

    def __init__(self, background: Background[T]) -> None:
        self._background = background

    def start(self, task: str, total: float, unit: str) -> None:
        self._background.tell().start(task, total, unit)

    def advance(self, task: str, amount: float, note: str = "") -> None:
        self._background.tell().advance(task, amount, note)

    def finish(self, task: str) -> None:
        self._background.tell().finish(task)
