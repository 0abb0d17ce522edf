# SPDX-License-Identifier: Apache-2.0
"""How a validation and an evaluation look on a terminal."""

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from patternsearch.validation.checks import ValidationReport
    from patternsearch.validation.evaluation import EvaluationReport
    from patternsearch.validation.quality_report import QualityReport
    from patternsearch.validation.task_report import TaskReport

__all__ = ["evaluation_tables", "validation_tables"]

_STYLES = {"ok": "green", "differs": "bold red", "cannot tell": "yellow"}


def validation_tables(report: "ValidationReport") -> list[Any]:
    """Return the table of checks, the worst heads, and the verdict."""
    table = Table(title=f"{report.config} on {report.model}", title_justify="left")
    table.add_column("check", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("expected", overflow="fold")
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    group = None
    for check in report.checks:
        if check.group != group:
            table.add_section()
            table.add_row(Text(check.group, style="bold"), "", "", "", "")
            group = check.group
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(
            Text(check.name), status, Text(check.expected), Text(check.found), Text(check.advice)
        )
    parts: list[Any] = [table]
    if report.quality is not None:
        parts += [worst_heads_table(report.quality)]
    parts += [Text(note, style="yellow") for note in report.notes]
    counts = {name: sum(c.status == name for c in report.checks) for name in _STYLES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    parts.append(Text(f"{report.status}: {said}", style=_STYLES[report.status]))
    return parts


def worst_heads_table(quality: "QualityReport") -> Table:
    """Return the heads that lose most, and the budgets that would mend them."""
    mended = {(r.layer, r.head, r.length): r for r in quality.remedies}
    table = Table(title=f"Worst heads on {quality.origin}", title_justify="left")
    for name in ("layer", "head", "length"):
        table.add_column(name, justify="right")
    table.add_column("pattern", overflow="fold")
    for name in ("mass", "worst region", "index gap", "rel. error", "cosine"):
        table.add_column(name, justify="right")
    table.add_column("mended by", overflow="fold")
    for head in quality.worst_heads():
        remedy = mended.get((head.layer, head.head, head.length))
        table.add_row(
            str(head.layer),
            str(head.head),
            str(head.length),
            head.pattern,
            f"{head.mass:.4f}",
            f"{head.worst_region:.4f}",
            f"{head.index_gap:.4f}",
            f"{head.relative_error:.3f}",
            f"{head.cosine:.4f}",
            remedy.mended if remedy else "",
        )
    return table


def evaluation_tables(report: "EvaluationReport") -> list[Any]:
    """Return the quality and the time of dense against sparse."""
    parts: list[Any] = []
    if report.task is not None:
        parts += task_tables(report.task)
    table = Table(title="Prefill, milliseconds", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("run")
    for name in ("total", "projection + RoPE", "index", "attention", "other"):
        table.add_column(name, justify="right")
    for row in report.prefill:
        attention = f"{row.attention_ms:.1f}"
        table.add_row(
            str(row.num_tokens),
            row.run,
            f"{row.total_ms:.1f}",
            f"{row.projection_ms:.1f}",
            f"{row.index_ms:.1f}",
            attention,
            f"{row.other_ms:.1f}",
        )
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
    logits = Table(title="Logits, dense against sparse", title_justify="left")
    for name in ("length", "positions", "KL", "top-1", "perplexity dense", "sparse"):
        logits.add_column(name, justify="right")
    for row in task.logits:
        logits.add_row(
            str(row.length),
            row.bucket,
            f"{row.kl:.4f}",
            f"{row.top1_agreement:.3f}",
            f"{row.dense_perplexity:.3f}",
            f"{row.sparse_perplexity:.3f}",
        )
    retrieval = Table(title="Retrieval, prompts answered", title_justify="left")
    for name in ("task", "length", "depth", "prompts", "dense", "sparse"):
        retrieval.add_column(name, justify="right")
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
