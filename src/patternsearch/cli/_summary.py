# SPDX-License-Identifier: Apache-2.0
"""What a person wants to know when calibrate has ended."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from patternsearch.cli._tables import KIND_HEADS, plain_table

if TYPE_CHECKING:
    from patternsearch.calibration.api import CalibrationOutcome
    from patternsearch.schema.config import HeadEntry, PatternConfig
    from patternsearch.selection.select import SelectedHeads

__all__ = ["backends_line", "calibration_summary", "kinds_by_layer"]


def _density(entry: "HeadEntry") -> float:
    """Density at the longest length."""
    return entry.lengths[-1].density if entry.lengths else 1.0


def _worst(entry: "HeadEntry") -> float:
    return min((at.mass_worst_region for at in entry.lengths), default=1.0)


def kinds_by_layer(config: "PatternConfig") -> Table:
    """Return a table of how many heads of each layer run which kind."""
    longest = config.calibration.lengths[-1] if config.calibration else None
    density = f"density at {longest}" if longest else "density"
    table = plain_table("Heads by layer", "layer", *KIND_HEADS.values(), density, "worst mass")
    everything: list[HeadEntry] = []
    for layer, entries in enumerate(config.heads):
        if entries is None:
            table.add_row(str(layer), *["-"] * len(KIND_HEADS), config.model.layer_types[layer], "")
            continue
        everything.extend(entries)
        table.add_row(str(layer), *_row(entries))
    table.add_row("all", *_row(everything))
    return table


def _row(entries: "Any") -> list[str]:
    counts = Counter(entry.pattern.kind for entry in entries)
    density = sum(_density(entry) for entry in entries) / len(entries)
    worst = min(_worst(entry) for entry in entries)
    return [*(str(counts[kind] or "·") for kind in KIND_HEADS), f"{density:.3f}", f"{worst:.3f}"]


def backends_line(selected: "SelectedHeads") -> str:
    """Say by name what the heads run on, by the timing table, at the longest length."""
    counts = ", ".join(f"{name} {count}" for name, count in selected.backends.items())
    return f"backends  {counts}"


def calibration_summary(outcome: "CalibrationOutcome") -> list[Any]:
    """Return what to print: the layer table, the totals, where things are, what to do next."""
    from patternsearch.calibration.estimate import format_duration

    config, selected = outcome.config, outcome.selected
    assert config.selection is not None
    lines = ["", *_totals(outcome)]
    spent = ", ".join(
        f"{name} {format_duration(seconds)}"
        for name, seconds in outcome.run.seconds.items()
        if seconds >= 0.5
    )
    lines += [
        f"time      {spent}",
        f"config    {outcome.config_path}",
        f"scores    {outcome.run.folder.root}",
        f"next      patternsearch show {outcome.config_path}",
        (
            f"          patternsearch report {outcome.config_path} -o "
            f"{outcome.config_path.with_suffix('.html')}"
        ),
    ]
    if not selected.record.measured:
        lines += [
            "times     measured: false, chosen by counted work; on the GPU that will serve:",
            "          patternsearch bench -o gpu.json",
            (
                f"          patternsearch select {outcome.run.folder.root} -o "
                f"{outcome.config_path} --timings gpu.json"
            ),
        ]
    return [kinds_by_layer(config), *lines]


def _totals(outcome: "CalibrationOutcome") -> list[str]:
    selected, record = outcome.selected, outcome.selected.record
    target = "none" if record.target_mass is None else f"{record.target_mass:g}"
    lines = [
        f"target    captured mass {target}, {record.statistic} sample, regions: {record.regions}"
    ]
    if record.measured:
        lines.extend(
            f"attention {at.length} tokens: {at.sparse_ms:.2f} ms predicted, dense "
            f"{at.dense_ms:.2f} ms ({at.dense_ms / at.sparse_ms:.2f}×) on {record.timings_device}; "
            f"launches {at.launch_ms:.1f} ms"
            for at in record.break_even
            if at.sparse_ms
        )
        lines.append(backends_line(selected))
        lines.append(f"dense     runs below {record.min_length} tokens (min_length)")
    else:
        share = selected.cost / selected.dense_cost if selected.dense_cost else 1.0
        lines.append(f"work      {share:.1%} of the dense pairs at the longest length")
    return lines
