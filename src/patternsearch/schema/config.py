# SPDX-License-Identifier: Apache-2.0
"""The pattern config: which pattern every head runs, and for exactly which model.

These models are the document. Reading and writing it is :mod:`patternsearch.schema.io`; older
versions are brought up by :mod:`patternsearch.schema.migrations`. Nothing here imports torch.

Units: lengths and budgets in tokens or tiles as their pattern says, masses and densities in
[0, 1], times in milliseconds of attention for one head (index + kernel).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from patternsearch.patterns.candidates import Candidate, Kind

__all__ = [
    "CONFIG_FORMAT",
    "CONFIG_SCHEMA_VERSION",
    "BreakEven",
    "Calibration",
    "Fingerprints",
    "HeadAtLength",
    "HeadEntry",
    "Imported",
    "LayerType",
    "ModelIdentity",
    "PatternConfig",
    "Provenance",
    "RankSlice",
    "Rope",
    "RunnerUp",
    "SampleRecord",
    "Selection",
    "TensorParallel",
]

CONFIG_FORMAT = "patternsearch/config"
CONFIG_SCHEMA_VERSION = 1

LayerType = Literal["full", "sliding", "linear"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Milliseconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Document(BaseModel):
    """Base of every part of the document: immutable, finite, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Rope(Document):
    """Rotary embedding of one layer type, as parameters and as the values computed from them."""

    rope_type: str
    parameters: dict[str, Any]
    attention_factor: Finite
    inverse_frequencies: tuple[Finite, ...]


class ModelIdentity(Document):
    """What a config is bound to. All heads are global query heads."""

    reference: str = Field(description="what the user named; information only, never compared")
    architecture: str
    model_type: str
    num_layers: PositiveInt
    layer_types: tuple[LayerType, ...]
    num_query_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    attention_scale: Finite
    logit_softcap: Finite | None
    sliding_window: PositiveInt | None
    dtype: str
    rope: dict[str, Rope] = Field(description="by layer type: full, sliding; empty without RoPE")
    max_positions: PositiveInt | None
    vocab_size: PositiveInt
    tokenizer_sha256: Sha256 | None
    weights_format: Literal["safetensors", "gguf", "pytorch", "random"]
    weights_sha256: Sha256 | None
    attention_sha256: tuple[Sha256, ...] = Field(
        description="one digest a layer over its attention tensors; empty where not computed"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "ModelIdentity":
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers"
            )
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads are not divisible by "
                f"{self.num_kv_heads} kv heads"
            )
        if self.attention_sha256 and len(self.attention_sha256) != self.num_layers:
            raise ValueError(
                f"attention_sha256 has {len(self.attention_sha256)} entries for "
                f"{self.num_layers} layers"
            )
        return self


class Fingerprints(Document):
    """Twelve numbers a head on a fixed pseudo-random probe; they tell heads apart.

    Per head: mass on key 0; mass at δ = 0, 1, 2–3, 4–7, …, 256–511 (ten numbers); mean normalised
    entropy. A layer that is not full attention has an empty list.
    """

    seed: int
    num_tokens: PositiveInt
    values: tuple[tuple[tuple[Finite, ...], ...], ...] = Field(description="[layer][head][12]")


class RankSlice(Document):
    """What one tensor-parallel rank holds."""

    rank: NonNegativeInt
    query_heads: tuple[NonNegativeInt, NonNegativeInt] = Field(description="[first, past the last)")
    kv_heads: tuple[NonNegativeInt, NonNegativeInt] = Field(description="[first, past the last)")
    predicted_ms: Milliseconds | None = Field(
        description="sum over layers at the longest calibrated length; null when not measured"
    )


class TensorParallel(Document):
    """Tensor-parallel layout. Head numbering stays global."""

    size: PositiveInt
    ranks: tuple[RankSlice, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "TensorParallel":
        if [rank.rank for rank in self.ranks] != list(range(self.size)):
            raise ValueError(f"ranks must be the {self.size} ranks of the layout in order")
        return self


class SampleRecord(Document):
    """A calibration sample, without its tokens (those are in the scores folder)."""

    sample_id: str
    source: str
    split: Literal["calibration", "heldout"]
    length: PositiveInt
    num_tokens: PositiveInt
    sha256: Sha256


class Calibration(Document):
    """Which text and which search produced the scores."""

    recipe: str
    recipe_sha256: Sha256
    grid: str
    grid_sha256: Sha256
    seed: int
    lengths: tuple[PositiveInt, ...]
    consumer: Literal["patternsearch", "minference", "vllm", "sglang"]
    oracle: bool
    row_sample: Annotated[float, Field(gt=0.0, le=1.0)]
    extrapolated: bool = Field(description="lengths beyond the model's positions were allowed")
    samples: tuple[SampleRecord, ...]


class BreakEven(Document):
    """Predicted attention time of the whole model at one calibrated length.

    On several ranks it is what the slowest rank of each layer takes.
    """

    length: PositiveInt
    dense_ms: Milliseconds
    sparse_ms: Milliseconds
    launch_ms: Milliseconds | None = Field(
        default=None,
        description="time that the host launches the chosen patterns for, beside the GPU's; null "
        "in documents older than it",
    )


class Selection(Document):
    """How one candidate per head was chosen."""

    objective: Literal["work", "time", "mass"] = Field(
        description="work: pairs executed, without timings; time and mass: with a timing table"
    )
    target_mass: Fraction | None
    budget_ms: Milliseconds | None
    budget_fraction: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None, description="the budget as it was asked for, of dense; null if in ms or none"
    )
    statistic: Literal["worst", "p05", "mean"]
    regions: Literal["each", "all"]
    kinds: tuple[Kind, ...]
    max_density: Fraction | None
    dense_layers: tuple[NonNegativeInt, ...]
    tie_tolerance: Fraction | None = Field(
        default=None,
        description="costs within this fraction of the cheapest count as equal; null: not recorded",
    )
    tp_size: PositiveInt
    measured: bool = Field(description="true only if times come from a timing table")
    timings_sha256: Sha256 | None
    timings_device: str | None
    min_length: PositiveInt | None = Field(
        description="below this many tokens dense is faster; null when not measured"
    )
    break_even: tuple[BreakEven, ...]


class HeadAtLength(Document):
    """How the chosen pattern does at one calibrated length (physical captured mass, online)."""

    length: PositiveInt
    mass_mean: Fraction
    mass_worst: Fraction = Field(description="worst sample, all rows")
    mass_worst_region: Fraction = Field(description="worst sample and region")
    mass_std: Annotated[float, Field(ge=0.0)]
    heldout_mean: Fraction | None
    heldout_worst_region: Fraction | None
    oracle_mean: Fraction | None
    density: Fraction
    tiles: Annotated[float, Field(ge=0.0)]
    columns: Annotated[float, Field(ge=0.0)]
    predicted_ms: Milliseconds | None


class RunnerUp(Document):
    """The next best candidate that also meets the target, at the longest length."""

    pattern: Candidate
    mass_worst_region: Fraction
    density: Fraction
    predicted_ms: Milliseconds | None


class HeadEntry(Document):
    """What one global query head runs, and why."""

    pattern: Candidate
    lengths: tuple[HeadAtLength, ...] = ()
    runner_up: RunnerUp | None = None
    imported_score: Finite | None = None


class Imported(Document):
    """Provenance of a config that came from another tool's file; nothing was measured by us."""

    format: Literal["minference", "vllm", "sglang"]
    file_sha256: Sha256
    score_kind: Literal["mass", "mismatch_count", "none", "unknown"]


class Provenance(Document):
    """Versions that produced the document. Dates and timings are in run.json, not here."""

    patternsearch: str
    torch: str | None = None
    triton: str | None = None
    transformers: str | None = None
    device: str | None = None
    backend: str | None = Field(default=None, description="torch or triton: the scoring path")


class PatternConfig(Document):
    """The whole document. ``heads[layer]`` is null for a layer that is not full attention."""

    format: Literal["patternsearch/config"]
    schema_version: Literal[1]
    provenance: Provenance
    model: ModelIdentity
    tensor_parallel: TensorParallel
    calibration: Calibration | None
    selection: Selection | None
    imported: Imported | None
    fingerprints: Fingerprints | None
    heads: tuple[tuple[HeadEntry, ...] | None, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "PatternConfig":
        model = self.model
        if len(self.heads) != model.num_layers:
            raise ValueError(f"heads has {len(self.heads)} layers, the model {model.num_layers}")
        for layer, (entries, layer_type) in enumerate(
            zip(self.heads, model.layer_types, strict=True)
        ):
            if (entries is None) != (layer_type != "full"):
                raise ValueError(
                    f"layer {layer} is {layer_type} attention but its heads are "
                    f"{'null' if entries is None else 'given'}"
                )
            if entries is not None and len(entries) != model.num_query_heads:
                raise ValueError(
                    f"layer {layer} has {len(entries)} heads, the model "
                    f"{model.num_query_heads}: every head needs an entry"
                )
        if (self.calibration is None) == (self.imported is None):
            raise ValueError("exactly one of calibration and imported must be given")
        self._check_fingerprints()
        return self

    def _check_fingerprints(self) -> None:
        if self.fingerprints is None:
            return
        layers = self.fingerprints.values
        if len(layers) != self.model.num_layers:
            raise ValueError(
                f"fingerprints has {len(layers)} layers, the model {self.model.num_layers}"
            )
        for layer, (heads, layer_type) in enumerate(
            zip(layers, self.model.layer_types, strict=True)
        ):
            wanted = self.model.num_query_heads if layer_type == "full" else 0
            if len(heads) != wanted:
                raise ValueError(
                    f"fingerprints has {len(heads)} heads in layer {layer}, not {wanted}"
                )
