# SPDX-License-Identifier: Apache-2.0
"""An engine's pattern file as a config: ours back without loss, others' with nothing invented.

A bare file becomes a config of provenance ``imported``: the patterns that the engine runs, its
scores kept apart, no masses, no densities, no times.
"""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from patternsearch._version import __version__
from patternsearch.errors import ConfigError
from patternsearch.exchange.consumers import CONSUMERS, Consumer, ConsumerName, pattern_of
from patternsearch.exchange.pattern_file import (
    PatternFile,
    ScoreKind,
    read_pattern_file,
    score_kind,
)
from patternsearch.exchange.sidecar import Sidecar, find_sidecar
from patternsearch.patterns.tensor_parallel import kv_head_range, query_head_range
from patternsearch.schema.config import (
    CONFIG_FORMAT,
    CONFIG_SCHEMA_VERSION,
    HeadEntry,
    Imported,
    ModelIdentity,
    PatternConfig,
    Provenance,
    RankSlice,
    TensorParallel,
)
from patternsearch.schema.files import read_bounded

__all__ = [
    "ImportedPatterns",
    "OwnExport",
    "find_own_export",
    "import_pattern_file",
    "patterns_of_file",
]


@dataclass(frozen=True, slots=True)
class OwnExport:
    """An export of ours with its sidecar.

    Attributes:
        sidecar: what was exported, for whom.
        is_edited: the file was changed since.
    """

    sidecar: Sidecar
    is_edited: bool


@dataclass(frozen=True, slots=True)
class ImportedPatterns:
    """The patterns that an engine runs for a file.

    Attributes:
        heads: [layer][head], with the file's score.
        score_kind: what the scores are.
        file_sha256: of the file's bytes.
        num_bumped: heads whose 30 columns the engine runs as 130.
    """

    heads: tuple[tuple[HeadEntry, ...], ...]
    score_kind: ScoreKind
    file_sha256: str
    num_bumped: int


def find_own_export(path: Path) -> OwnExport | None:
    """Return what the sidecar of an exported file tells; None for a file without one."""
    sidecar = find_sidecar(path)
    if sidecar is None:
        return None
    digest = sha256(read_bounded(path)).hexdigest()
    return OwnExport(sidecar, is_edited=digest != sidecar.file_sha256)


def patterns_of_file(
    file: PatternFile, source: ConsumerName, max_positions: int | None, *, name: str
) -> ImportedPatterns:
    """Read a file's entries as the engine ``source`` runs them.

    Raises:
        ConfigError: an entry that this engine does not run, with its layer and head.
    """
    consumer = CONSUMERS[source]
    heads = []
    for layer, entries in enumerate(file.layers):
        row = []
        for head, entry in enumerate(entries):
            try:
                pattern = pattern_of(entry, consumer, max_positions)
            except ConfigError as problem:
                raise ConfigError(f"{name}: layer {layer} head {head}: {problem}") from None
            row.append(HeadEntry(pattern=pattern, imported_score=entry.score))
        heads.append(tuple(row))
    return ImportedPatterns(
        heads=tuple(heads),
        score_kind=score_kind(file),
        file_sha256=file.sha256,
        num_bumped=_num_bumped(file, consumer),
    )


def _num_bumped(file: PatternFile, consumer: Consumer) -> int:
    return sum(
        entry.name == "vertical_and_slash" and entry.vertical == consumer.bumped_vertical
        for entries in file.layers
        for entry in entries
    )


def import_pattern_file(
    path: Path, source: ConsumerName, model: ModelIdentity
) -> tuple[PatternConfig, ImportedPatterns]:
    """Import a bare pattern file for a model.

    Raises:
        ConfigError: a fault in the file, or its shape is not the model's.
    """
    file = read_pattern_file(path)
    _check_shape(file, model, path)
    patterns = patterns_of_file(file, source, model.max_positions, name=str(path))
    config = PatternConfig(
        format=CONFIG_FORMAT,
        schema_version=CONFIG_SCHEMA_VERSION,
        provenance=Provenance(patternsearch=__version__),
        model=model,
        tensor_parallel=_single_rank(model),
        calibration=None,
        selection=None,
        imported=Imported(
            format=source,
            file_sha256=patterns.file_sha256,
            score_kind=patterns.score_kind,
        ),
        fingerprints=None,
        heads=patterns.heads,
    )
    return config, patterns


def _check_shape(file: PatternFile, model: ModelIdentity, path: Path) -> None:
    wanted = (model.num_layers, model.num_query_heads)
    if file.shape != wanted:
        layers, heads = file.shape
        raise ConfigError(
            f"{path} holds {layers} layers × {heads} heads, {model.reference} has {wanted[0]} × "
            f"{wanted[1]} query heads: it belongs to another model"
        )
    others = [kind for kind in model.layer_types if kind != "full"]
    if others:
        raise ConfigError(
            f"{model.reference} has {len(others)} {others[0]}-attention layers; "
            f"{path} gives every layer a full-attention pattern and cannot be imported for it"
        )


def _single_rank(model: ModelIdentity) -> TensorParallel:
    return TensorParallel(
        size=1,
        ranks=(
            RankSlice(
                rank=0,
                query_heads=query_head_range(model.num_query_heads, 1, 0),
                kv_heads=kv_head_range(model.num_query_heads, model.num_kv_heads, 1, 0),
                predicted_ms=None,
            ),
        ),
    )
