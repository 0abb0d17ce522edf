# SPDX-License-Identifier: Apache-2.0
"""Steps that bring an older config document up to the current schema version.

A step is a pure function of plain values, from one version to the next; steps are chained. Every
released version has a golden file under ``tests/golden/config`` that must migrate to what is
committed beside it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from patternsearch._version import __version__
from patternsearch.errors import ConfigError
from patternsearch.schema.config import CONFIG_SCHEMA_VERSION

__all__ = ["MIGRATIONS", "Migration", "migrate"]

Migration = Callable[[dict[str, Any]], dict[str, Any]]

MIGRATIONS: Mapping[int, Migration] = {}
"""By the version that a step starts from. Version 1 is the first and current one."""


def migrate(
    document: dict[str, Any],
    *,
    name: str,
    target: int = CONFIG_SCHEMA_VERSION,
    steps: Mapping[int, Migration] = MIGRATIONS,
) -> dict[str, Any]:
    """Return ``document`` at schema version ``target``; a current document is returned as it is.

    Args:
        document: plain values with an integer ``schema_version``.
        name: stands for the document in messages.
        target: the version to reach.
        steps: by the version that they start from.

    Raises:
        ConfigError: the version is no known integer, or is newer than ``target``.
    """
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        raise ConfigError(
            f"{name}: schema_version is {version!r}: it must be an integer from 1 to {target}"
        )
    if version > target:
        raise ConfigError(
            f"{name}: schema_version {version} is newer than {target}, the newest that "
            f"patternsearch {__version__} reads: upgrade patternsearch"
        )
    while version < target:
        document = steps[version](dict(document))
        version += 1
        document["schema_version"] = version
    return document
