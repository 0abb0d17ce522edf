# SPDX-License-Identifier: Apache-2.0
"""What a comparison of head fingerprints says, and the distances that rounding explains."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "SAME_LAYER_DISTANCE",
    "SAME_MEDIAN_DISTANCE",
    "Finding",
    "LayerMapping",
    "MappingReport",
    "Verdict",
]

Verdict = Literal["same weights", "fine-tuned, patterns plausibly hold", "different model"]

SAME_MEDIAN_DISTANCE = 0.007
"""Median distance of a head to itself up to which only rounding differs (bfloat16: 0.004)."""

SAME_LAYER_DISTANCE = 0.06
"""The same for the median of any one layer (bfloat16: 0.040)."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Part):
    """One fault of the mapping, named."""

    kind: Literal[
        "swapped heads", "permuted heads", "shifted heads", "tensor-parallel offset",
        "kv groups permuted", "gqa map", "layers permuted", "changed layers",
    ]  # fmt: skip
    layers: tuple[int, ...]
    text: str


class LayerMapping(_Part):
    """How one full-attention layer's heads compare.

    ``similarity`` is 1 − (median distance of a head to itself) / (median distance of two heads of
    this layer), at least 0. ``holders[h]`` is the recorded head found at place h, itself unless it
    moved.
    """

    layer: int
    similarity: float
    median_distance: float
    worst_distance: float
    worst_head: int
    holders: tuple[int, ...]


class MappingReport(_Part):
    """The whole comparison."""

    verdict: Verdict
    similarity: float
    median_distance: float
    first_departure: int | None
    layers: tuple[LayerMapping, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every head is where the config says, in a model like the recorded one."""
        return not self.findings and self.verdict != "different model"

    @property
    def summary(self) -> str:
        """Say the result in one sentence."""
        parts = [finding.text for finding in self.findings[:4]]
        if len(self.findings) > 4:
            parts.append(f"and {len(self.findings) - 4} more faults")
        return "; ".join(parts) or f"{self.verdict}, similarity {self.similarity:.2f}"
