"""The published MInference files, read in place beside the repository; tests skip without them."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "minference_configs"
FILES = sorted(FOLDER.glob("*.json")) if FOLDER.is_dir() else []

needs_published = pytest.mark.skipif(not FILES, reason="the published files are not here")


def published(part):
    """Return the one published file whose name holds ``part``."""
    (path,) = [path for path in FILES if part in path.name]
    return path
