# SPDX-License-Identifier: Apache-2.0
"""What a benchmark has measured so far, on disk after every measurement.

A run that is killed, or dies of a fault of the GPU, continues where it stopped: same plan, same
machine, same kernels. What it was measuring when it died twice is left out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from patternsearch.errors import EnvironmentLacks
from patternsearch.timing.table import LaunchSetting, Skipped, TimingRow

__all__ = ["Journal", "JournalError"]

_MAX_STARTS = 2


class JournalError(EnvironmentLacks):
    """Measurements cannot be kept or read back; going on would lose them."""


class Journal:
    """Rows, launch settings and skipped cases; kept in a file if there is a path.

    Args:
        path: JSON lines; None keeps nothing on disk.
        header: what must be equal for an earlier file to be continued.
        note: told one line if an earlier file is continued or set aside.

    Raises:
        JournalError: the file cannot be read or written, now or later.

    Attributes:
        rows: measurements by identity.
        settings: launch settings.
        skipped: what could not run.
    """

    def __init__(
        self,
        path: Path | None = None,
        header: dict[str, Any] | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.rows: dict[str, TimingRow] = {}
        self.settings: list[LaunchSetting] = []
        self.skipped: list[Skipped] = []
        self._starts: Counter[str] = Counter()
        self._path = path
        if path is None:
            return
        wanted = json.loads(json.dumps(header or {}))
        if path.exists() and self._read(path, wanted):
            note(f"continuing: {len(self.rows)} measurements of an earlier run are in {path}")
            self._append("\n", "a")  # after what may be a torn line
            return
        if path.exists():
            note(f"{path} is of another plan, machine or version: starting afresh")
        self._append(json.dumps({"header": wanted}) + "\n", "w")

    @contextmanager
    def running(self, case: str) -> Iterator[None]:
        """Note that a case begins, and that it has ended, unless the run dies of it.

        A user who interrupts a run does not count as a case that kills it.

        Raises:
            EnvironmentLacks: earlier runs died of this case; it is not begun.
        """
        if self._starts[case] >= _MAX_STARTS:
            raise EnvironmentLacks(f"{case}: earlier runs died while they measured it")
        self._starts[case] += 1
        self._write("start", case)
        try:
            yield
        except (KeyboardInterrupt, EnvironmentLacks):
            self._finish(case)
            raise
        self._finish(case)

    def _finish(self, case: str) -> None:
        del self._starts[case]
        self._write("finish", case)

    def add_row(self, row: TimingRow) -> None:
        """Keep a measurement."""
        self.rows[row.identity()] = row
        self._write("row", row.model_dump(mode="json"))

    def add_settings(self, settings: list[LaunchSetting]) -> None:
        """Keep the settings of one class of launches."""
        self.settings += settings
        self._write("settings", [setting.model_dump(mode="json") for setting in settings])

    def add_skipped(self, skipped: Skipped) -> None:
        """Keep why something is missing; the same case is kept once, and tried again next time."""
        self.skipped.append(skipped)

    def remove(self) -> None:
        """Delete the file: the table holds everything."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _write(self, key: str, value: Any) -> None:
        self._append(json.dumps({key: value}) + "\n", "a")

    def _append(self, text: str, mode: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open(mode) as file:
                file.write(text)
        except OSError as error:
            raise JournalError(
                f"cannot keep measurements in {self._path} ({error.strerror or error}): make room "
                "or write the table elsewhere; the same command continues"
            ) from error

    def _read(self, path: Path, header: dict[str, Any]) -> bool:
        """Load an earlier file; False if it is not of this run. A torn last line is dropped."""
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise JournalError(
                f"cannot read the earlier measurements {path} ({error.strerror or error}): remove "
                "it or write the table elsewhere"
            ) from error
        try:
            if json.loads(lines[0]) != {"header": header}:
                return False
        except ValueError:
            return False
        for line in lines[1:]:
            try:
                ((key, value),) = json.loads(line).items()
                self._take(key, value)
            except (ValueError, AttributeError, ValidationError):
                continue
        return True

    def _take(self, key: str, value: Any) -> None:
        match key:
            case "row":
                row = TimingRow.model_validate(value)
                self.rows[row.identity()] = row
            case "settings":
                self.settings += [LaunchSetting.model_validate(item) for item in value]
            case "start":
                self._starts[value] += 1
            case "finish":
                del self._starts[value]
