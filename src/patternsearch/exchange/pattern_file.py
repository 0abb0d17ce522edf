# SPDX-License-Identifier: Apache-2.0
"""MInference's pattern file: a bare JSON list of layers, strictly read and canonically written.

The list's index is the global layer; each item maps the global query head, as a string, to
``[name, vertical, slash, score]``. Engines silently run a default for a missing head, or fail in
service; here every head must be there.
"""

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from patternsearch.errors import ConfigError
from patternsearch.exchange.consumers import SPARSE_FILE_NAME, Entry, is_finite_score
from patternsearch.schema.canonical import compact_json
from patternsearch.schema.files import read_bounded
from patternsearch.schema.reading import Source, parse_source

__all__ = [
    "PatternFile",
    "ScoreKind",
    "dumps_pattern_file",
    "foreign_schema",
    "parse_pattern_file",
    "read_pattern_file",
    "score_kind",
]

ScoreKind = Literal["mass", "mismatch_count", "none", "unknown"]

_MAX_BYTES = 64 * 2**20
_MAX_BUDGET = 2**31 - 1
_MASS_ROUNDING = 1e-2


@dataclass(frozen=True, slots=True)
class PatternFile:
    """A pattern file.

    Attributes:
        layers: [layer][head].
        sha256: of the file's bytes.
    """

    layers: tuple[tuple[Entry, ...], ...]
    sha256: str

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return len(self.layers), len(self.layers[0])


def read_pattern_file(path: str | os.PathLike[str]) -> PatternFile:
    """Read a pattern file.

    Raises:
        ConfigError: not a pattern file, or a fault in it, with its place.
    """
    content = read_bounded(path, max_bytes=_MAX_BYTES)
    # Whatever the file is called, only JSON is read by the engines.
    name = str(path)
    return parse_pattern_file(_parse_as_json(content, name), sha256(content).hexdigest())


def _parse_as_json(content: bytes, name: str) -> Source:
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        raise ConfigError(f"{name}: a pattern file is JSON and its name ends in .json")
    return parse_source(content, name)


def parse_pattern_file(source: Source, digest: str) -> PatternFile:
    """Check a parsed document and build the pattern file that it holds."""
    document, name = source.value, source.name
    if not isinstance(document, list):
        raise ConfigError(f"{name}: {_no_list(document, name)}")
    if not document:
        raise ConfigError(f"{name}: the list of layers is empty")
    num_heads = len(document[0]) if isinstance(document[0], dict) else 0
    layers = []
    for layer, item in enumerate(document):
        where = f"{name}: layer {layer}"
        if not isinstance(item, dict):
            raise ConfigError(f"{where} is {_short(item)}: it must map head numbers to entries")
        if not item:
            raise ConfigError(f"{where} has no heads: engines would silently run a default")
        _check_heads(item, num_heads, where)
        layers.append(tuple(_entry(item[str(h)], f"{where} head {h}") for h in range(num_heads)))
    return PatternFile(tuple(layers), digest)


def _check_heads(item: dict[str, Any], num_heads: int, where: str) -> None:
    wanted = {str(head) for head in range(num_heads)}
    if missing := wanted - item.keys():
        heads = ", ".join(sorted(missing, key=int)[:8])
        raise ConfigError(
            f"{where} lacks head {heads}: every layer needs heads 0..{num_heads - 1}, "
            "engines would silently run a default or fail"
        )
    if unknown := item.keys() - wanted:
        keys = ", ".join(repr(key) for key in sorted(unknown)[:8])
        raise ConfigError(
            f"{where} has {keys}: keys are the head numbers 0..{num_heads - 1} as strings, "
            "the same in every layer"
        )


def _entry(value: Any, where: str) -> Entry:
    if not isinstance(value, list) or len(value) != 4:
        raise ConfigError(
            f"{where} is {_short(value)}: it must be [pattern, vertical, slash, score]"
        )
    name, vertical, slash, score = value
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where} has pattern {_short(name)}: it must be a pattern's name")
    for what, budget in (("vertical", vertical), ("slash", slash)):
        if type(budget) is not int or not 0 <= budget <= _MAX_BUDGET:
            raise ConfigError(
                f"{where} has {what} {_short(budget)}: it must be a whole number of tokens"
            )
    if not is_finite_score(score):
        raise ConfigError(f"{where} has score {_short(score)}: it must be a number or null")
    return Entry(name, vertical, slash, score)


def _no_list(document: Any, name: str) -> str:
    if (foreign := foreign_schema(document)) is not None:
        return f"this is {foreign}, not a pattern file"
    if isinstance(document, dict) and "format" in document:
        return f"this document has format {document['format']!r}; it is no pattern file"
    return f"a pattern file is a JSON list of layers, this is {_short(document)}"


def foreign_schema(document: Any) -> str | None:
    """Name the other tool that keeps a document under the same file name, if it is one known."""
    if not isinstance(document, dict):
        return None
    if "config_groups" in document:
        return f"a Model-Optimizer {SPARSE_FILE_NAME}"
    if document.keys() & {"use_sparse_attention", "sparse_block_size", "sparse_topk_blocks"}:
        return f"a model's own {SPARSE_FILE_NAME.removesuffix('.json')} section"
    if "alphas" in document and "betas" in document:
        return "a MoA plan"
    return None


def score_kind(file: PatternFile) -> ScoreKind:
    """Tell what a file's scores are.

    MInference's search writes a captured mass, a little above 1 by bf16 rounding; its second
    version writes a count of output elements that mismatch, where less is better.
    """
    scores = [entry.score for layer in file.layers for entry in layer]
    if all(score is None for score in scores):
        return "none"
    numbers = [score for score in scores if score is not None]
    if len(numbers) != len(scores) or min(numbers) < 0:
        return "unknown"
    if any(isinstance(score, float) for score in numbers):
        return "mass" if max(numbers) <= 1 + _MASS_ROUNDING else "unknown"
    return "mismatch_count" if max(numbers) > 1 else "unknown"


def dumps_pattern_file(layers: tuple[tuple[Entry, ...], ...]) -> str:
    """Write a pattern file, one layer a line."""
    lines = []
    for layer in layers:
        values = {
            str(head): [entry.name, entry.vertical, entry.slash, entry.score]
            for head, entry in enumerate(layer)
        }
        lines.append(compact_json(values))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
