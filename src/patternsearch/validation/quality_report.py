# SPDX-License-Identifier: Apache-2.0
"""What the quality level measured, head by head and layer by layer."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["HeadQuality", "LayerQuality", "QualityReport", "Remedy"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadQuality(_Part):
    """One head at one length; means over samples unless said otherwise."""

    layer: int
    head: int
    pattern: str
    length: int
    recorded_mass: float | None = Field(description="the config's, over the same kind of samples")
    mass: float = Field(description="physical captured mass now, online index")
    worst_region: float = Field(description="worst sample and region")
    oracle_mass: float
    density: float
    relative_error: float = Field(description="‖sparse − dense‖ / ‖dense‖ of the head's output")
    cosine: float = Field(description="mean over rows of the cosine of sparse and dense output")
    error_over_bound: float = Field(
        description="mean row error over 2 · (1 − mass) · max ‖v‖, which it cannot exceed"
    )

    @property
    def index_gap(self) -> float:
        """Return what the estimator loses against the same budget chosen with all of attention."""
        return self.oracle_mass - self.mass


class LayerQuality(_Part):
    """One layer at one length: its own error, and with every layer sparse."""

    layer: int
    length: int
    own_error: float = Field(description="only this layer sparse: relative L2 at its output")
    accumulated_error: float = Field(description="all layers sparse: relative L2 at its output")


class Remedy(_Part):
    """A budget that brings a head to the target."""

    layer: int
    head: int
    length: int
    pattern: str
    worst_region: float
    mended: str
    mended_worst_region: float


class QualityReport(_Part):
    """The whole measurement."""

    origin: str
    samples: tuple[str, ...]
    backend: str
    dtype: str
    target_mass: float | None
    heads: tuple[HeadQuality, ...]
    layers: tuple[LayerQuality, ...]
    remedies: tuple[Remedy, ...]
    final_error: dict[int, float] = Field(
        description="by length: relative L2 of the last hidden states, all layers sparse"
    )
    swapped: tuple[str, ...] = Field(description="entries whose records fit each other's heads")

    def worst_heads(self, count: int = 10) -> tuple[HeadQuality, ...]:
        """Return the heads that lose most mass in their worst region."""
        return tuple(sorted(self.heads, key=lambda head: head.worst_region)[:count])
