# SPDX-License-Identifier: Apache-2.0
"""A difference as plain values for programs and as Markdown for reviews."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from patternsearch.exchange.diff import Diff, HeadChange, LayerChange, Totals
from patternsearch.exchange.fields import FieldChange
from patternsearch.exchange.words import number, short_pattern

__all__ = ["FIELD_PARTS", "diff_document", "diff_markdown", "field_value", "kinds_in_words"]

FIELD_PARTS = ("identity", "tensor_parallel", "calibration", "selection")
"""The parts whose changes are differences, in the order of every output."""

_MAX_HEADS = 40


def diff_document(diff: Diff) -> dict[str, Any]:
    """Return everything about a difference as plain JSON values."""
    return {
        "a": dict(zip(("name", "kind", "file_sha256"), diff.a, strict=True)),
        "b": dict(zip(("name", "kind", "file_sha256"), diff.b, strict=True)),
        "differs": {on: diff.differs(on) for on in ("any", "pattern", "budget", "identity")},
        **{part: _fields(getattr(diff, part)) for part in (*FIELD_PARTS, "provenance")},
        "shape": {"a": list(diff.shape[0]), "b": list(diff.shape[1])},
        "length": diff.length,
        "scores": {
            "a": diff.score_kind[0],
            "b": diff.score_kind[1],
            "comparable": diff.is_score_comparable,
        },
        "heads": {what: diff.count(what) for what in ("pattern", "budget", "numbers", "stale")},
        "totals": {"a": _totals(diff.totals[0]), "b": _totals(diff.totals[1])},
        "most_moved_layers": [layer.layer for layer in diff.most_moved()],
        "layers": [_layer(layer) for layer in diff.layers],
        "notes": list(diff.notes),
    }


def _fields(changes: Iterable[FieldChange]) -> list[dict[str, Any]]:
    return [{"field": change.name, "a": change.a, "b": change.b} for change in changes]


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "kinds": totals.kinds,
        "density": totals.density,
        "predicted_ms": totals.predicted_ms,
        "score": totals.score,
    }


def _layer(layer: LayerChange) -> dict[str, Any]:
    return {
        "layer": layer.layer,
        "pattern": layer.num_pattern,
        "budget": layer.num_budget,
        "numbers": layer.num_numbers,
        "stale": layer.num_stale,
        "a": _totals(layer.a),
        "b": _totals(layer.b),
        "heads": [_head(head) for head in layer.heads],
    }


def _head(head: HeadChange) -> dict[str, Any]:
    return {
        "head": head.head,
        "what": head.what,
        "stale": head.is_stale,
        "a": head.a and head.a.model_dump(),
        "b": head.b and head.b.model_dump(),
        **{
            name: {"a": pair[0], "b": pair[1]}
            for name, pair in (
                ("score", head.score),
                ("density", head.density),
                ("predicted_ms", head.predicted_ms),
            )
        },
    }


def diff_markdown(diff: Diff) -> str:
    """Return a difference as a Markdown section."""
    return "\n".join(_markdown(diff)) + "\n"


def _markdown(diff: Diff) -> Iterator[str]:
    yield "# Pattern diff"
    yield ""
    for label, (name, kind, digest) in (("A", diff.a), ("B", diff.b)):
        yield f"- {label}: `{name}` ({kind}, `{digest[:12]}`)"
    if not diff.differs():
        yield ""
        yield "No differences."
    for part in FIELD_PARTS:
        changes = getattr(diff, part)
        if changes:
            rows = [[f"`{c.name}`", field_value(c.a), field_value(c.b)] for c in changes]
            yield from _table(part.replace("_", " ").capitalize(), ("field", "A", "B"), rows)
    if diff.differs():
        yield from _table("Totals", ("", "A", "B"), list(_total_rows(diff)))
    if diff.layers:
        yield from _table(
            "Layers",
            ("layer", "pattern", "budget", "numbers", "stale", "density", "predicted ms"),
            [
                [
                    *map(str, (x.layer, x.num_pattern, x.num_budget, x.num_numbers, x.num_stale)),
                    _arrow(x.a.density, x.b.density),
                    _arrow(x.a.predicted_ms, x.b.predicted_ms),
                ]
                for x in diff.layers
            ],
        )
        heads = [head for layer in diff.layers for head in layer.heads]
        yield from _table(
            f"Heads ({min(len(heads), _MAX_HEADS)} of {len(heads)} that differ)",
            ("layer", "head", "A", "B", "score", "density"),
            [
                [
                    str(x.layer),
                    str(x.head),
                    short_pattern(x.a),
                    short_pattern(x.b),
                    _arrow(*x.score),
                    _arrow(*x.density),
                ]
                for x in heads[:_MAX_HEADS]
            ],
        )
    if diff.notes:
        yield ""
        yield from (f"> {note}" for note in diff.notes)


def _total_rows(diff: Diff) -> Iterator[list[str]]:
    a, b = diff.totals
    yield ["heads", kinds_in_words(a), kinds_in_words(b)]
    at = f" at {diff.length} tokens" if diff.length else ""
    yield [f"density{at}", number(a.density), number(b.density)]
    yield [f"predicted ms{at}", number(a.predicted_ms), number(b.predicted_ms)]
    if diff.is_score_comparable:
        yield [f"mean score{at}", number(a.score, 4), number(b.score, 4)]


def _table(title: str, header: tuple[str, ...], rows: list[list[str]]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield _row(header)
    yield _row(["---"] * len(header))
    for row in rows:
        yield _row(row)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _arrow(a: float | None, b: float | None) -> str:
    return "–" if a is None and b is None else f"{number(a)} → {number(b)}"


def kinds_in_words(totals: Totals) -> str:
    """Return the heads by kind as ``a_shape 3, dense 1``."""
    return ", ".join(f"{kind} {count}" for kind, count in totals.kinds.items())


def field_value(value: Any) -> str:
    """Return a changed field's value as text; digests shortened."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value[:12] + "…" if len(value) == 64 and " " not in value else value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
