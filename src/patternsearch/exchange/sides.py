# SPDX-License-Identifier: Apache-2.0
"""What can be compared: our configs, our exports (edited or not) and bare pattern files."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from patternsearch.exchange.consumers import CONSUMERS, ConsumerName, entry_of, is_writable
from patternsearch.exchange.export import export_score
from patternsearch.exchange.importing import find_own_export, patterns_of_file
from patternsearch.exchange.pattern_file import PatternFile, parse_pattern_file
from patternsearch.exchange.ranks import Heads
from patternsearch.exchange.sidecar import Sidecar
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.files import read_bounded
from patternsearch.schema.io import config_from_source
from patternsearch.schema.reading import collector_paused, parse_source

__all__ = ["Side", "load_sides"]

SideKind = Literal["config", "export", "edited export", "pattern file"]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison.

    Attributes:
        name: as the user gave it.
        kind: what it is.
        file_sha256: of the file's bytes.
        config: the config, or the one that an export was made from; None for a bare file.
        heads: [layer][head] as it stands there now.
        score_kind: what its masses or scores are, in words; two sides are compared by score only
            if these words are the same.
        edited: heads of an edited export that are not as exported, as (layer, head).
    """

    name: str
    kind: SideKind
    file_sha256: str
    config: PatternConfig | None
    heads: Heads
    score_kind: str
    edited: tuple[tuple[int, int], ...] = ()


def load_sides(a: Path, b: Path) -> tuple[Side, Side]:
    """Load both sides of a comparison.

    A bare file says what some engine runs; it is read as the engine that the other side was made
    for or came from, else as MInference.

    Raises:
        ConfigError: a side is neither a config nor a pattern file, or has a fault.
    """
    with collector_paused():
        first = _load(a)
        second = _load(b)
    engine = _engine(first) or _engine(second) or "minference"
    return _finish(first, a, engine), _finish(second, b, engine)


def _load(path: Path) -> Side | PatternFile:
    content = read_bounded(path)
    source = parse_source(content, str(path))
    digest = sha256(content).hexdigest()
    if isinstance(source.value, list):
        return parse_pattern_file(source, digest)
    config = config_from_source(source)
    return Side(
        name=str(path),
        kind="config",
        file_sha256=digest,
        config=config,
        heads=config.heads,
        score_kind=_score_kind(config),
    )


def _engine(side: Side | PatternFile) -> ConsumerName | None:
    if isinstance(side, PatternFile) or side.config is None:
        return None
    config = side.config
    if config.imported is not None:
        return config.imported.format
    consumer = config.calibration.consumer if config.calibration else "patternsearch"
    return None if consumer == "patternsearch" else consumer


def _score_kind(config: PatternConfig) -> str:
    if config.imported is not None:
        return _file_score_kind(config.imported.score_kind)
    assert config.calibration is not None
    family = "patternsearch" if config.calibration.consumer == "patternsearch" else "MInference"
    return f"captured mass of {family}'s physical sets"


def _file_score_kind(kind: str) -> str:
    return {
        "mass": "captured mass by the file's own search",
        "mismatch_count": "count of mismatching outputs, less is better",
        "none": "no scores",
        "unknown": "scores of unknown meaning",
    }[kind]


def _finish(side: Side | PatternFile, path: Path, engine: ConsumerName) -> Side:
    if isinstance(side, Side):
        return side
    own = find_own_export(path)
    if own is None:
        patterns = patterns_of_file(side, engine, None, name=str(path))
        return Side(
            name=str(path),
            kind="pattern file",
            file_sha256=side.sha256,
            config=None,
            heads=patterns.heads,
            score_kind=_file_score_kind(patterns.score_kind),
        )
    if own.is_edited:
        return _edited(side, own.sidecar, path)
    config = own.sidecar.config
    return Side(
        name=str(path),
        kind="export",
        file_sha256=side.sha256,
        config=config,
        heads=config.heads,
        score_kind=_score_kind(config),
    )


def _edited(file: PatternFile, sidecar: Sidecar, path: Path) -> Side:
    """Take from the sidecar what the edit left alone, and the edited heads from the file."""
    config, consumer = sidecar.config, CONSUMERS[sidecar.consumer]
    positions = config.model.max_positions
    patterns = patterns_of_file(file, sidecar.consumer, positions, name=str(path))
    edited = []
    heads = []
    for layer, entries in enumerate(file.layers):
        exported = (config.heads[layer] or ()) if layer < len(config.heads) else ()
        row = []
        for head, entry in enumerate(entries):
            was = exported[head] if head < len(exported) else None
            if (
                was is not None
                and is_writable(was.pattern, consumer)
                and entry_of(was.pattern, consumer, export_score(was, config), positions) == entry
            ):
                row.append(was)
            else:
                edited.append((layer, head))
                row.append(patterns.heads[layer][head])
        heads.append(tuple(row))
    return Side(
        name=str(path),
        kind="edited export",
        file_sha256=file.sha256,
        config=config,
        heads=tuple(heads),
        score_kind=_score_kind(config),
        edited=tuple(edited),
    )
