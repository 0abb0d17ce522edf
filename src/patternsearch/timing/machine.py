# SPDX-License-Identifier: Apache-2.0
"""What a timing table says about the machine it was measured on."""

from dataclasses import asdict
from typing import Any

import torch

from patternsearch.timing.cases import Plan
from patternsearch.timing.devices import gpu_state
from patternsearch.timing.environment import package_version
from patternsearch.timing.table import Clocks, kernel_digest

__all__ = ["Machine"]

_PACKAGES = ("torch", "triton", "flash-attn-4")


class Machine:
    """One device, looked at while it is measured.

    Args:
        device: what is measured; anything but CUDA tells only its name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks: list[int] = []
        self._memory_mhz: int | None = None
        self._driver: str | None = None

    def look(self) -> None:
        """Note the clocks of this moment."""
        if self._device.type != "cuda":
            return
        state = gpu_state(self._device.index or 0)
        self._driver = state.driver
        self._memory_mhz = state.memory_mhz
        if state.sm_mhz:
            self._clocks.append(state.sm_mhz)

    def header(self, plan: Plan) -> dict[str, Any]:
        """Return what two runs must share for one to continue the other."""
        facts = self.facts()
        facts.pop("clocks")
        return {**facts, "plan": asdict(plan), "kernel_sha256": kernel_digest()}

    def facts(self) -> dict[str, Any]:
        """Return the parts of a table that describe the machine."""
        self.look()
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            name, capability = properties.name, f"{properties.major}.{properties.minor}"
        else:
            name, capability = self._device.type, "none"
        versions = {package: package_version(package) for package in _PACKAGES}
        return {
            "device": name,
            "compute_capability": capability,
            "driver": self._driver,
            "clocks": Clocks(
                sm_mhz_min=min(self._clocks, default=None),
                sm_mhz_max=max(self._clocks, default=None),
                memory_mhz=self._memory_mhz,
            ),
            "versions": {**versions, "cuda": torch.version.cuda},
        }
