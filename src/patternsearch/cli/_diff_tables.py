# SPDX-License-Identifier: Apache-2.0
"""A difference for a terminal of 80 columns or more."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from patternsearch.cli._tables import plain_table
from patternsearch.exchange.diff import Diff, LayerChange, Totals
from patternsearch.exchange.diff_output import FIELD_PARTS, field_value, kinds_in_words
from patternsearch.exchange.fields import FieldChange
from patternsearch.exchange.words import number, short_pattern

__all__ = ["diff_tables"]

_MAX_HEADS = 20
_MAX_LAYERS = 20


def diff_tables(diff: Diff) -> Iterator[Any]:
    """Yield what to print, most important first."""
    for label, (name, kind, digest) in (("A", diff.a), ("B", diff.b)):
        yield Text(f"{label}  {name}  ({kind}, {digest[:12]})", no_wrap=True, overflow="fold")
    for note in diff.notes:
        yield Text(f"note: {note}", style="yellow")
    if not diff.differs():
        yield Text("no differences", style="green")
    for part in FIELD_PARTS:
        if changes := getattr(diff, part):
            yield _fields(part.replace("_", " ").capitalize(), changes)
    if diff.differs():
        yield _totals(diff)
        yield Text(
            f"heads that differ: {diff.count('pattern')} pattern, {diff.count('budget')} budget, "
            f"{diff.count('numbers')} numbers only, {diff.count('stale')} stale"
        )
    if diff.layers:
        yield _layers(diff.layers)
        if moved := diff.most_moved():
            yield Text(f"moved most: layers {', '.join(str(x.layer) for x in moved)}")
        yield _heads(diff)
    if diff.provenance:
        yield _fields("Versions (information, no difference)", diff.provenance)


def _fields(title: str, changes: tuple[FieldChange, ...]) -> Table:
    table = plain_table(title, "field", "A", "B", left=("field", "A", "B"))
    table.columns[0].max_width = 34
    table.columns[1].max_width = table.columns[2].max_width = 31
    for change in changes:
        table.add_row(
            *(Text(x) for x in (change.name, field_value(change.a), field_value(change.b)))
        )
    return table


def _totals(diff: Diff) -> Table:
    def cells(totals: Totals) -> list[str]:
        return [
            kinds_in_words(totals),
            number(totals.density),
            number(totals.predicted_ms),
            number(totals.score if diff.is_score_comparable else None, 4),
        ]

    at = f" at {diff.length} tokens" if diff.length else ""
    names = ["heads", "density", "predicted ms", "mean score"]
    table = plain_table(f"Totals{at}", "", "A", "B", left=("", "A", "B"))
    table.columns[1].max_width = table.columns[2].max_width = 36
    for row in zip(names, cells(diff.totals[0]), cells(diff.totals[1]), strict=True):
        table.add_row(*row)
    return table


def _layers(layers: tuple[LayerChange, ...]) -> Table:
    counts = ("layer", "pattern", "budget", "numbers", "stale")
    sides = ("density A", "density B", "ms A", "ms B")
    table = plain_table(_some("Layers", len(layers), _MAX_LAYERS), *counts, *sides)
    for x in sorted(layers, key=lambda layer: layer.moved, reverse=True)[:_MAX_LAYERS]:
        table.add_row(
            *map(str, (x.layer, x.num_pattern, x.num_budget, x.num_numbers, x.num_stale)),
            *(number(v) for v in (x.a.density, x.b.density, x.a.predicted_ms, x.b.predicted_ms)),
        )
    return table


def _heads(diff: Diff) -> Table:
    heads = [head for layer in diff.layers for head in layer.heads]
    names = ("layer", "head", "A", "B", "score A", "score B", "")
    table = plain_table(_some("Heads", len(heads), _MAX_HEADS), *names, left=("A", "B", ""), gap=1)
    for head in heads[:_MAX_HEADS]:
        table.add_row(
            str(head.layer),
            str(head.head),
            short_pattern(head.a),
            short_pattern(head.b),
            *(number(score, 4) for score in head.score),
            "stale" if head.is_stale else "",
        )
    return table


def _some(title: str, count: int, limit: int) -> str:
    return f"{title} ({limit} of {count} that differ)" if count > limit else title
