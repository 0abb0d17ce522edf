# SPDX-License-Identifier: Apache-2.0
"""A config on one screen of 100 columns; the map of heads reads with and without colour."""

from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from patternsearch.cli._tables import plain_table
from patternsearch.exchange.summary import RankView, Summary
from patternsearch.exchange.words import LETTERS, number, short_pattern
from patternsearch.schema.config import HeadEntry, PatternConfig

__all__ = ["config_view", "layer_view", "rank_tables"]

_STYLES = {"D": "red", "A": "green", "V": "cyan", "B": "yellow"}
_MAP_WIDTH = 64


def config_view(config: PatternConfig, summary: Summary) -> Iterator[Any]:
    """Yield the whole screen."""
    facts = plain_table("", "name", "text", left=("name", "text"), heads=False)
    facts.columns[0].style = "bold"
    for name, text in _facts(config, summary):
        facts.add_row(name, Text(text))
    yield facts
    yield _legend(summary.kinds)
    yield head_map(summary.map, config.model.layer_types)
    if summary.worst:
        yield _worst(config, summary)


def _facts(config: PatternConfig, summary: Summary) -> Iterator[tuple[str, str]]:
    model = config.model
    yield "model", f"{model.reference}  {model.architecture}, {model.dtype}"
    digest = (model.weights_sha256 or "not computed")[:12]
    yield (
        "weights",
        f"{digest} ({model.weights_format}); head_dim {model.head_dim}, {_rope(config)}",
    )
    others = {kind: model.layer_types.count(kind) for kind in ("sliding", "linear")}
    sorts = "".join(f", {count} {kind}" for kind, count in others.items() if count)
    yield (
        "layout",
        (
            f"{model.num_layers} layers{sorts} × {model.num_query_heads} query heads over "
            f"{model.num_kv_heads} kv heads; tensor-parallel size {config.tensor_parallel.size}"
        ),
    )
    if (c := config.calibration) is not None:
        heldout = sum(s.split == "heldout" for s in c.samples)
        yield (
            "calibration",
            (
                f"{c.recipe}, {len(c.samples)} samples ({heldout} held out) at "
                f"{', '.join(map(str, c.lengths))} tokens, seed {c.seed}, grid {c.grid}, "
                f"for {c.consumer}{', oracle' if c.oracle else ''}"
                + (f", rows sampled {c.row_sample:g}" if c.row_sample < 1 else "")
                + (", beyond the model's positions" if c.extrapolated else "")
            ),
        )
    if (i := config.imported) is not None:
        yield "imported", f"from {i.format}, file {i.file_sha256[:12]}, scores: {i.score_kind}"
    if (s := config.selection) is not None:
        target = "no target" if s.target_mass is None else f"target mass {s.target_mass:g}"
        times = f"measured on {s.timings_device}" if s.measured else "not measured"
        yield "selection", f"{s.objective}, {target}, {s.statistic} sample, {times}"
        if s.min_length is not None:
            yield "break-even", f"dense runs below {s.min_length} tokens"
    yield "totals", _totals(summary)


def _rope(config: PatternConfig) -> str:
    ropes = config.model.rope.items()
    return ", ".join(f"RoPE {rope.rope_type} ({name})" for name, rope in ropes) or "no RoPE"


def _totals(summary: Summary) -> str:
    if summary.length is None:
        return "no masses, densities or times: nothing was measured by patternsearch"
    text = (
        f"density {number(summary.density)} at {summary.length} tokens, "
        f"worst mass {number(summary.worst_mass, 4)}"
    )
    if summary.predicted_ms is not None:
        text += f", {summary.predicted_ms:.2f} ms predicted"
    return text


def _legend(kinds: dict[str, int]) -> Text:
    text = Text()
    for kind, count in kinds.items():
        text.append(LETTERS[kind], _STYLES[LETTERS[kind]])
        text.append(f" {kind} {count}   ")
    return text


def head_map(rows: Iterable[str | None], layer_types: tuple[str, ...]) -> Text:
    """Draw a line a layer, a letter a head; equal neighbouring layers share a line."""
    text = Text()
    numbered = list(zip(rows, layer_types, strict=True))
    layer = 0
    for (row, kind), group in groupby(numbered):
        count = len(list(group))
        name = str(layer) if count == 1 else f"{layer}-{layer + count - 1}"
        layer += count
        if row is None:
            text.append(f"{name:>7}  {kind} attention\n")
            continue
        for start in range(0, len(row), _MAP_WIDTH):
            text.append(f"{name if start == 0 else '':>7} ")
            for head, char in enumerate(row[start : start + _MAP_WIDTH]):
                text.append(" " if head % 8 == 0 else "")
                text.append(char, _STYLES[char])
            text.append("\n")
    text.rstrip()
    return text


def _worst(config: PatternConfig, summary: Summary) -> Table:
    is_file = config.imported is not None
    score = config.imported.score_kind if config.imported else "worst-region mass"
    names = ("layer", "head", score.replace("_", " "), "at tokens", "density", "pattern")
    table = plain_table("Worst heads", *names, left=("pattern",))
    for x in summary.worst:
        at = next((at for at in x.entry.lengths if at.length == x.length), None)
        table.add_row(
            str(x.layer),
            str(x.head),
            number(x.score, 4),
            "–" if is_file else str(x.length),
            number(at.density if at else None),
            short_pattern(x.entry.pattern),
        )
    return table


def layer_view(layer: int, heads: tuple[HeadEntry, ...], first: int = 0) -> Table:
    """Return a table of every head of a layer: a line a length, the runner-up below the pattern.

    ``first`` is the number of the first head.
    """
    lengths = [at.length for at in heads[0].lengths]
    numbers = ("tokens", "worst-region mass", "density", "ms") if lengths else ("file score",)
    title = f"Layer {layer}; under each pattern its runner-up"
    table = plain_table(title, "head", "pattern", *numbers, left=("pattern",))
    for head, entry in enumerate(heads, start=first):
        names = [short_pattern(entry.pattern)]
        if entry.runner_up:
            names.append(f"  or {short_pattern(entry.runner_up.pattern)}")
        rows: list[tuple[str, ...]] = [
            (
                str(at.length),
                number(at.mass_worst_region, 4),
                number(at.density),
                number(at.predicted_ms),
            )
            for at in entry.lengths
        ] or [(number(entry.imported_score, 4),)]
        for place, (name, cells) in enumerate(zip_longest(names, rows, fillvalue=())):
            table.add_row(str(head) if place == 0 else "", name or "", *cells)
    return table


def rank_tables(config: PatternConfig, view: RankView) -> Iterator[Any]:
    """Yield what one rank runs."""
    (q0, q1), (k0, k1) = view.slice.query_heads, view.slice.kv_heads
    yield Text(
        f"rank {view.slice.rank} of {view.size}: query heads {q0}-{q1 - 1}, kv heads {k0}-{k1 - 1}"
    )
    if view.slice.predicted_ms is None:
        time = "predicted time: not measured"
    else:
        assert view.slowest is not None
        time = (
            f"predicted attention {view.slice.predicted_ms:.2f} ms; slowest is rank "
            f"{view.slowest.rank} with {number(view.slowest.predicted_ms, 2)} ms"
        )
    yield Text(f"{time}; density {number(view.density)}")
    yield _legend(view.kinds)
    yield head_map(view.map, config.model.layer_types)
