# SPDX-License-Identifier: Apache-2.0
"""Keeps transformers from drawing progress bars of its own into ours."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

__all__ = ["quiet_library"]


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's own progress bars for a while (warnings are logged and stay)."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(_MutedHere(sys.stderr)):  # the GGUF reader's bar has no switch
            yield
    finally:
        if was_on:
            logging.enable_progress_bar()


class _MutedHere:
    """A stream that drops what the thread that made it writes, and passes on what others do."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
