# SPDX-License-Identifier: Apache-2.0
"""One run at a time on one scores folder."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patternsearch.errors import InputError

__all__ = ["exclusive"]


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at ``path``; the kernel frees it however the process ends.

    Raises:
        InputError: another run holds it, and the message says which; or it cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InputError(
            f"{path} cannot be made ({error.strerror}): choose an output you may write to"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise InputError(
                f"{path.parent} is in use by {holder or 'another run'}: wait for it to end, "
                "or choose another output"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
