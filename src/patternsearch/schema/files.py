# SPDX-License-Identifier: Apache-2.0
"""Bounded reading and atomic writing of whole files, with errors a user can act on."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from patternsearch.errors import ConfigError, EnvironmentLacks, InputError

__all__ = ["MAX_DOCUMENT_BYTES", "read_bounded", "write_atomic"]

MAX_DOCUMENT_BYTES = 256 * 2**20
"""Larger documents are refused before they are read."""


def read_bounded(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_DOCUMENT_BYTES,
    error: type[InputError] = ConfigError,
) -> bytes:
    """Read a regular file of at most ``max_bytes`` bytes.

    Raises:
        InputError: (as ``error``) missing, not a regular file, unreadable or too large.
    """
    path = Path(path)
    try:
        # Not blocking, so that a named pipe without a writer is refused instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise error(f"{path} is {kind}: give the path of a document")
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise error(f"{path} does not exist: check the path") from None
    except OSError as problem:
        if problem.errno == errno.EISDIR:
            raise error(f"{path} is a folder: give the path of a document") from None
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from None
    if len(content) > max_bytes:
        raise error(f"{path} is larger than {max_bytes} bytes, the limit for this kind of document")
    return content


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` so that ``path`` holds either its old or the whole new content.

    A temporary file in the same folder is written, synchronised and renamed; the folder is
    synchronised. A symlink is followed. Nothing is left behind on failure.

    Raises:
        InputError: the folder is missing or may not be written to.
        EnvironmentLacks: the disk is full or fails.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        if target.is_dir():
            raise InputError(f"{path} is a folder: give the path of a file")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as problem:
        raise _writing_failed(Path(path), target.parent, problem) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems cannot synchronise a folder; the rename has happened.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _writing_failed(path: Path, folder: Path, problem: OSError) -> InputError | EnvironmentLacks:
    if problem.errno in (errno.ENOENT, errno.ENOTDIR):
        return InputError(f"cannot write {path}: folder {folder} does not exist; create it first")
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InputError(
            f"cannot write {path}: {problem.strerror}; choose a folder you may write to"
        )
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentLacks(
            f"cannot write {path}: {problem.strerror}; free some space and run again"
        )
    return EnvironmentLacks(f"cannot write {path}: {problem.strerror or problem}")
