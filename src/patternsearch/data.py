# SPDX-License-Identifier: Apache-2.0
"""Where the data files lie that ship with the package: ``configs/`` and ``calib/``.

In a checkout (also when installed editable) they are the repository's folders; the build copies
them into ``patternsearch/_data`` of a wheel.
"""

from pathlib import Path

from patternsearch.errors import EnvironmentLacks

__all__ = ["data_path"]

_PACKAGE = Path(__file__).resolve().parent


def data_path(relative: str) -> Path:
    """Return the path of a shipped file or folder, such as ``configs/grids``.

    Raises:
        EnvironmentLacks: the installation has no such file.
    """
    checkout = _PACKAGE.parent.parent
    roots = [_PACKAGE / "_data"]
    if (checkout / "pyproject.toml").is_file() and (checkout / "src") == _PACKAGE.parent:
        roots.insert(0, checkout)
    for root in roots:
        if (root / relative).exists():
            return root / relative
    raise EnvironmentLacks(
        f"the installed patternsearch lacks its data file {relative}: install it again"
    )
