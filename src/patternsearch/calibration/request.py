# SPDX-License-Identifier: Apache-2.0
"""What a calibration was asked for, and the part of it that decides the scores.

Two runs with the same :func:`score_request` write the same scores; a resumed run must have the
same one. Selection options are not in it: another target needs no new scores.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from patternsearch.errors import InputError
from patternsearch.schema.config import ModelIdentity

__all__ = ["CalibrationRequest", "changed_arguments", "digest", "score_request"]

Consumer = Literal["patternsearch", "minference", "vllm", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Arguments of one calibration that decide its scores.

    Attributes:
        model: checkpoint folder, hub id or ``.gguf`` file.
        output: path of the config; the scores go to ``<stem>.scores`` beside it.
        recipe: path or name of a recipe.
        grid: path or name of a grid.
        lengths: sample lengths in tokens; None takes the recipe's.
        samples: samples a length (calibration split); None takes the recipe's.
        seed: None takes the recipe's.
        consumer: whose physical sets are scored.
        oracle: also score every candidate with the oracle index (one more pass).
        row_sample: fraction of the query rows that are scored, in (0, 1].
        tp_ranks: tensor-parallel ranks that run one copy of the model here.
        device: torch device.
        dtype: name of a torch dtype; None is the checkpoint's on CUDA and float32 on the CPU.
        allow_extrapolation: lengths beyond the model's positions are allowed, and recorded.
        trust_remote_code: run code that comes with the checkpoint.
        allow_pickle: read a checkpoint that has only ``.bin`` files (as plain tensors).
        offline: open no network connection; a hub id is looked up in the local cache only.
        fresh: discard scores that an earlier run left at this output.
    """

    model: str
    output: Path
    recipe: str
    grid: str
    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    seed: int | None = None
    consumer: Consumer = "patternsearch"
    oracle: bool = False
    row_sample: float = 1.0
    tp_ranks: int = 1
    device: str = "cpu"
    dtype: str | None = None
    allow_extrapolation: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    offline: bool = False
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.output.suffix not in (".yaml", ".yml", ".json"):
            raise InputError(
                f"output {self.output} must end in .yaml, .yml or .json: it is the config's format"
            )
        if not 0.0 < self.row_sample <= 1.0:
            raise InputError(f"row sample {self.row_sample} must be in (0, 1], such as 0.125")
        for length in self.lengths or ():
            if length < 1:
                raise InputError(f"length {length} must be at least 1 token")


def digest(document: Any) -> str:
    """Return the SHA-256 of a JSON-able document in canonical form."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def score_request(
    request: CalibrationRequest,
    *,
    identity: ModelIdentity,
    dtype: str,
    backend: str,
    recipe_sha256: str,
    grid_sha256: str,
    lengths: tuple[int, ...],
    seed: int,
) -> dict[str, Any]:
    """Return everything the scores depend on, as a flat JSON-able mapping."""
    # Sums over ranks round differently; named only where it applies.
    parallel = {"tp_ranks": request.tp_ranks} if request.tp_ranks > 1 else {}
    return {
        **parallel,
        "weights_sha256": identity.weights_sha256,
        "tokenizer_sha256": identity.tokenizer_sha256,
        "recipe_sha256": recipe_sha256,
        "grid_sha256": grid_sha256,
        "lengths": list(lengths),
        "samples": request.samples,
        "seed": seed,
        "consumer": request.consumer,
        "oracle": request.oracle,
        "row_sample": request.row_sample,
        "device_type": request.device.split(":")[0],
        "dtype": dtype,
        "backend": backend,
        "extrapolated": request.allow_extrapolation,
    }


def changed_arguments(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name each argument that differs, with both values."""
    return [
        f"{name}: was {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
