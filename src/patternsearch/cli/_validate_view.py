# SPDX-License-Identifier: Apache-2.0
"""How a validation and an evaluation look on a terminal."""

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from patternsearch.cli._tables import plain_table
from patternsearch.validation.checks import INFORMATION

if TYPE_CHECKING:
    from patternsearch.validation.checks import ValidationReport
    from patternsearch.validation.evaluation import EvaluationReport
    from patternsearch.validation.quality_report import QualityReport
    from patternsearch.validation.task_report import TaskReport

__all__ = ["evaluation_tables", "validation_tables"]

_JUDGED = ("quality", "task")
"""Groups whose found values say little without the rule that they were held to."""

_STYLES = {"ok": "green", "differs": "bold red", "cannot tell": "yellow"}


def validation_tables(report: "ValidationReport") -> list[Any]:
    """Return the table of checks, the worst heads, and the verdict."""
    parts: list[Any] = [_checks_table(report)]
    if report.quality is not None:
        parts.append(worst_heads_table(report.quality))
    parts += [Text(note, style="yellow") for note in report.notes]
    counts = {name: sum(c.status == name for c in report.checks) for name in _STYLES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    parts.append(Text(f"{report.status}: {said}", style=_STYLES[report.status]))
    return parts


def _checks_table(report: "ValidationReport") -> Table:
    """Return a line a check; what was expected and what to do stand below what is not well."""
    columns = ("check", "status", "found")
    table = plain_table(f"{report.config} on {report.model}", *columns, left=columns)
    table.columns[0].max_width = 30
    table.columns[1].no_wrap = True
    group = None
    for check in report.checks:
        if check.group != group:
            table.add_row(Text(check.group, style="bold"))
            group = check.group
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(Padding(Text(check.name), (0, 0, 0, 2)), status, Text(check.found))
        is_rule = check.group in _JUDGED and check.expected != INFORMATION
        if check.status != "ok" or is_rule:
            table.add_row("", "expected", Text(check.expected), style="dim")
        if check.advice:
            table.add_row("", "do", Text(check.advice))
    return table


def worst_heads_table(quality: "QualityReport") -> Table:
    """Return the heads that lose most, and below each the budget that would mend it."""
    mended = {(r.layer, r.head, r.length): r for r in quality.remedies}
    names = ("layer", "head", "tokens", "pattern", "mass", "worst\nregion", "index\ngap",
             "rel.\nerror", "cosine")  # fmt: skip
    title = f"Worst heads on {quality.origin}"
    table = plain_table(title, *names, left=("pattern",), gap=1)
    for head in quality.worst_heads():
        remedy = mended.get((head.layer, head.head, head.length))
        table.add_row(
            str(head.layer),
            str(head.head),
            str(head.length),
            head.pattern + (f"\n→ {remedy.mended}" if remedy else ""),
            f"{head.mass:.4f}",
            f"{head.worst_region:.4f}",
            f"{head.index_gap:.4f}",
            f"{head.relative_error:.3f}",
            f"{head.cosine:.4f}",
        )
    if mended:
        table.caption = "→ the first doubling of the budget that reaches the target, else dense"
        table.caption_justify = "left"
    return table


def evaluation_tables(report: "EvaluationReport") -> list[Any]:
    """Return the quality and the time of dense against sparse."""
    parts: list[Any] = []
    if report.task is not None:
        parts += task_tables(report.task)
    names = ("tokens", "run", "kernel", "total", "proj. + RoPE", "index", "attention", "other")
    table = plain_table("Prefill, milliseconds", *names, left=("run", "kernel"))
    for row in report.prefill:
        times = (row.total_ms, row.projection_ms, row.index_ms, row.attention_ms, row.other_ms)
        numbers = (f"{time:.1f}" for time in times)
        table.add_row(str(row.num_tokens), row.run, row.kernel, *numbers)
    parts.append(table)
    for pair in report.speedups():
        parts.append(
            Text(
                f"{pair.num_tokens} tokens: attention {pair.attention:.2f}× (with its index), "
                f"prefill {pair.prefill:.2f}×, density {pair.density:.3f}"
            )
        )
    facts = report.environment
    parts.append(
        Text(
            f"{facts.get('gpu_0') or 'CPU'}, {report.dtype}, torch {facts.get('torch')}; "
            "medians of "
            f"{report.repetitions} after {report.warm_up} warm-up runs that are not counted"
        )
    )
    return parts


def task_tables(task: "TaskReport") -> list[Any]:
    """Return logits, retrieval and continuations."""
    logits = plain_table(
        "Logits, dense against sparse",
        "tokens", "positions", "KL", "top-1", "where decided", "perplexity dense", "sparse",
    )  # fmt: skip
    for row in task.logits:
        logits.add_row(
            str(row.length),
            row.bucket,
            f"{row.kl:.4f}",
            f"{row.top1_agreement:.3f}",
            "–" if row.decided_agreement is None else f"{row.decided_agreement:.3f}",
            f"{row.dense_perplexity:.3f}",
            f"{row.sparse_perplexity:.3f}",
        )
    names = ("task", "tokens", "depth", "prompts", "dense", "sparse")
    retrieval = plain_table("Retrieval, prompts answered", *names, left=("task",))
    for found in task.retrieval:
        retrieval.add_row(
            found.task,
            str(found.length),
            f"{found.depth:g}",
            str(found.num_prompts),
            str(found.dense_correct),
            str(found.sparse_correct),
        )
    lines = [
        Text(
            f"greedy, {row.length} tokens: {row.agreeing_prefix:.0%} of {row.num_tokens} new "
            "tokens before the first change"
        )
        for row in task.greedy
    ]
    return [logits, retrieval, *lines]
