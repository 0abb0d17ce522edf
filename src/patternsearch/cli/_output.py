# SPDX-License-Identifier: Apache-2.0
"""The one place that prints: results to stdout, talk to stderr.

Rich is imported with the first console, since ``--version`` and ``--help`` need none of it here.
"""

import json
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Output", "stderr_console"]


def stderr_console() -> "Console":
    """Return the console for talk: progress, notes, errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Output:
    """Sink of one command run: a table for people or one JSON document for programs.

    Args:
        as_json: True sends only JSON to stdout; :meth:`show` is then silent.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @cached_property
    def _out(self) -> "Console":
        from rich.console import Console

        return Console(highlight=False)

    @cached_property
    def _err(self) -> "Console":
        return stderr_console()

    def show(self, *renderables: Any) -> None:
        """Print something for people to stdout, unless the command answers in JSON."""
        if not self.as_json:
            for renderable in renderables:
                self._out.print(renderable)

    def data(self, document: Any) -> None:
        """Print the result as one JSON document to stdout, if asked for."""
        if self.as_json:
            json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
            sys.stdout.write("\n")

    def text(self, text: str) -> None:
        """Write text to stdout as it is (a schema, a file's content)."""
        sys.stdout.write(text)

    def note(self, message: str) -> None:
        """Say something about the run to stderr."""
        self._err.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Say to stderr what the user should look at."""
        self._err.print(f"warning: {message}", markup=False, soft_wrap=True, style="yellow")
