# SPDX-License-Identifier: Apache-2.0
"""What this machine is: versions and devices, for provenance and bug reports."""

import platform
from importlib import metadata
from typing import Any

from patternsearch._version import __version__

__all__ = ["describe_environment", "package_version"]

_PACKAGES = (
    "torch", "triton", "transformers", "datasets", "pydantic", "pandas", "pyarrow",
    "safetensors", "flash-attn-4",
)  # fmt: skip


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def describe_environment() -> dict[str, Any]:
    """Return versions and devices as a flat JSON-able mapping; None is «not installed»."""
    import torch

    facts: dict[str, Any] = {
        "patternsearch": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts.update({name: package_version(name) for name in _PACKAGES})
    facts["cuda"] = torch.version.cuda
    facts["num_gpus"] = torch.cuda.device_count()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"gpu_{index}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"compute capability {properties.major}.{properties.minor}"
        )
    return facts
