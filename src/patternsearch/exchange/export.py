# SPDX-License-Identifier: Apache-2.0
"""A config as the file that an engine reads, with the sidecar that makes it importable again.

The file holds every global head of every layer, whatever the tensor-parallel size: each engine
slices by rank itself. What the engine cannot run as it is meant is refused, heads named.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from patternsearch.errors import ConfigError, InputError
from patternsearch.exchange.consumers import (
    CONSUMERS,
    SPARSE_FILE_NAME,
    Consumer,
    ConsumerName,
    entry_of,
    is_writable,
)
from patternsearch.exchange.pattern_file import dumps_pattern_file, foreign_schema
from patternsearch.exchange.sidecar import Sidecar, dumps_sidecar, find_sidecar, sidecar_path
from patternsearch.patterns.candidates import Candidate, Dense, VerticalSlashLastQ, describe
from patternsearch.patterns.forced import FORCED_COLUMNS, FORCED_SLASHES
from patternsearch.schema.config import HeadEntry, PatternConfig
from patternsearch.schema.files import write_atomic
from patternsearch.schema.reading import load_document

__all__ = ["Export", "export_config", "export_score", "name_heads", "output_path", "write_export"]

_DEFAULT_THRESHOLD = 32768
_TRITON_HEAD_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Export:
    """A finished export, not yet written.

    Attributes:
        consumer: whom it is for.
        text: the pattern file.
        sidecar: the text of the file beside it.
        model_config: what to merge into the model's config.json; empty for MInference.
        notes: what the user should know, one sentence each.
    """

    consumer: Consumer
    text: str
    sidecar: str
    model_config: dict[str, Any]
    notes: tuple[str, ...]


def export_config(config: PatternConfig, to: ConsumerName) -> Export:
    """Export a config for an engine.

    Raises:
        ConfigError: a layer or a head that the engine cannot run as the config says.
    """
    consumer = CONSUMERS[to]
    layers = _full_layers(config, consumer)
    _refuse_inexpressible(layers, consumer)
    text = dumps_pattern_file(
        tuple(
            tuple(
                entry_of(
                    head.pattern, consumer, export_score(head, config), config.model.max_positions
                )
                for head in heads
            )
            for heads in layers
        )
    )
    digest = sha256(text.encode()).hexdigest()
    return Export(
        consumer=consumer,
        text=text,
        sidecar=dumps_sidecar(Sidecar(to, digest, config)),
        model_config=_model_config(config, consumer),
        notes=tuple(_notes(config, layers, consumer)),
    )


def _full_layers(config: PatternConfig, consumer: Consumer) -> tuple[tuple[HeadEntry, ...], ...]:
    others = [layer for layer, heads in enumerate(config.heads) if heads is None]
    if others:
        kinds = " and ".join(sorted({config.model.layer_types[layer] for layer in others}))
        raise ConfigError(
            f"{consumer.name} would run the {kinds} attention of layers {_ranges(others)} as full "
            "attention: this model cannot be exported to it"
        )
    return tuple(heads for heads in config.heads if heads is not None)


def _refuse_inexpressible(layers: tuple[tuple[HeadEntry, ...], ...], consumer: Consumer) -> None:
    by_pattern: dict[Candidate, list[tuple[int, int]]] = {}
    for layer, heads in enumerate(layers):
        for head, entry in enumerate(heads):
            if not is_writable(entry.pattern, consumer):
                by_pattern.setdefault(entry.pattern, []).append((layer, head))
    if not by_pattern:
        return
    num_heads = sum(map(len, by_pattern.values()))
    faults = [f"  {describe(pattern)}: {name_heads(at)}" for pattern, at in by_pattern.items()]
    raise ConfigError(
        f"{consumer.name} cannot run {num_heads} of {sum(map(len, layers))} heads as they are:\n"
        + "\n".join(faults)
        + f"\nuse --reselect with scores calibrated with --consumer {consumer.name}"
    )


def export_score(head: HeadEntry, config: PatternConfig) -> int | float | None:
    """Return the score to write: the mean captured mass at the longest length, or what came in."""
    if head.lengths:
        return head.lengths[-1].mass_mean
    score = head.imported_score
    if score is not None and config.imported and config.imported.score_kind == "mismatch_count":
        return int(score)
    return score


def _model_config(config: PatternConfig, consumer: Consumer) -> dict[str, Any]:
    if not consumer.in_model_folder:
        return {}
    least = config.selection.min_length if config.selection else None
    return {
        "dual_chunk_attention_config": {
            "sparse_attention_enabled": True,
            "sparse_attention_threshold": max(_DEFAULT_THRESHOLD, least or 0),
            "sparse_attention_last_q": 64,
        }
    }


def _notes(
    config: PatternConfig, layers: tuple[tuple[HeadEntry, ...], ...], consumer: Consumer
) -> Iterable[str]:
    patterns = [head.pattern for heads in layers for head in heads]
    raised = sum(
        isinstance(p, VerticalSlashLastQ)
        and (p.vertical < FORCED_COLUMNS or p.slash < FORCED_SLASHES)
        for p in patterns
    )
    if raised:
        yield (
            f"{raised} heads ask for less than the forced {FORCED_COLUMNS} columns and "
            f"{FORCED_SLASHES} slashes; these are written"
        )
    bumped = sum(
        isinstance(p, VerticalSlashLastQ)
        and max(p.vertical, FORCED_COLUMNS) == consumer.bumped_vertical
        for p in patterns
    )
    if bumped:
        yield (
            f"{bumped} heads with 30 columns are written with 31: "
            f"{consumer.name} would run 30 as 130"
        )
    dense = sum(isinstance(p, Dense) for p in patterns)
    if dense:
        yield f"{dense} dense heads are written as budgets beyond any sequence"
    measured_for = config.calibration.consumer if config.calibration else None
    if measured_for == "patternsearch" and dense < len(patterns):
        yield (
            f"the masses are those of patternsearch's physical sets; {consumer.name} reads other "
            f"keys for the same entry: calibrate with --consumer {consumer.name} to judge it"
        )
    head_dim = config.model.head_dim
    if consumer.name == "minference" and head_dim not in _TRITON_HEAD_DIMS:
        yield (
            f"MInference's kernels are written for head_dim {_TRITON_HEAD_DIMS}; this model has "
            f"{head_dim}: its A-shape kernel then scales by the padded size, test before trusting"
        )
    if consumer.in_model_folder:
        yield (
            f"{consumer.title} reads the file as {SPARSE_FILE_NAME} in the model's folder, "
            "and only for models with a dual_chunk_attention_config"
        )
    if consumer.name == "vllm":
        yield "newer vLLM engines read the file and use nothing of it"


def name_heads(at: Iterable[tuple[int, int]], limit: int = 12) -> str:
    """Name heads as ``layer 3 heads 0-2,5; layer 4 head 1``, at most ``limit`` layers."""
    layers: dict[int, list[int]] = {}
    for layer, head in at:
        layers.setdefault(layer, []).append(head)
    names = [
        f"layer {layer} head{'s' if len(heads) > 1 else ''} {_ranges(heads)}"
        for layer, heads in layers.items()
    ]
    more = f"; and {len(names) - limit} more layers" if len(names) > limit else ""
    return "; ".join(names[:limit]) + more


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers as ``0-2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ----------------------------------------------------------------------------------- writing


def output_path(path: Path, consumer: Consumer) -> Path:
    """Return the file to write: inside a folder, the name that the engine looks for."""
    if path.is_dir():
        return path / (SPARSE_FILE_NAME if consumer.in_model_folder else "best_pattern.json")
    if path.suffix.lower() != ".json":
        raise InputError(f"{path}: a pattern file's name ends in .json")
    return path


def write_export(export: Export, path: Path, *, force: bool = False) -> tuple[Path, Path]:
    """Write an export and its sidecar.

    Returns:
        The paths of both.

    Raises:
        InputError: a file is there that this program did not write, and no ``force``.
    """
    path = output_path(path, export.consumer)
    if not force:
        _refuse_foreign(path)
    beside = sidecar_path(path)
    # The sidecar first: a crash in between leaves an export that is noticed as not its own.
    write_atomic(beside, export.sidecar.encode())
    write_atomic(path, export.text.encode())
    return path, beside


def _refuse_foreign(path: Path) -> None:
    way_out = "choose another name, or pass --force to replace it"
    beside = sidecar_path(path)
    try:
        sidecar = find_sidecar(path)
    except InputError as problem:
        raise InputError(f"{problem}; or pass --force to replace both") from None
    if not path.exists():
        return
    if sidecar is None:
        raise InputError(
            f"{path} exists and was not written by patternsearch{_what(path)}: {way_out}"
        )
    if sha256(path.read_bytes()).hexdigest() != sidecar.file_sha256:
        raise InputError(f"{path} was edited since {beside.name} was written: {way_out}")


def _what(path: Path) -> str:
    try:
        foreign = foreign_schema(load_document(path, max_bytes=64 * 2**20))
    except InputError:
        return ""
    return f" (it is {foreign})" if foreign else ""
