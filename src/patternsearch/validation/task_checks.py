# SPDX-License-Identifier: Apache-2.0
"""What the task measurement means: rows of the table of checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from patternsearch.runtime.fit import Status
from patternsearch.validation.checks import INFORMATION, Check
from patternsearch.validation.task_report import Retrieval, TaskReport

__all__ = ["TaskLimits", "check_task"]

_ADVICE = "look at the worst heads of the quality level; select with a higher --target-mass"


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """What a sparse model may lose.

    Attributes:
        kl: mean KL divergence of the logits, nats.
        decided_agreement: of the positions where dense finds a token at least twice as likely as
            any other, the share where sparse finds the same one most likely.
        perplexity_ratio: sparse over dense.
        retrieval_drop: share of the prompts that dense answers more than sparse; a single prompt
            is never held against it.
        retrieval_floor: share of the prompts that dense must answer for a task to say anything.
    """

    kl: float = 0.1
    decided_agreement: float = 0.98
    perplexity_ratio: float = 1.03
    retrieval_drop: float = 0.05
    retrieval_floor: float = 0.5


def check_task(report: TaskReport, limits: TaskLimits | None = None) -> tuple[Check, ...]:
    """Judge the measurement."""
    return tuple(_checks(report, limits or TaskLimits()))


def _checks(report: TaskReport, limits: TaskLimits) -> Iterator[Check]:
    for row in report.logits:
        if row.bucket != "all":
            continue
        worst = max(
            (r for r in report.logits if r.length == row.length and r.bucket != "all"),
            key=lambda r: r.kl,
        )
        same = row.decided_agreement
        yield _check(
            f"logits at {row.length} tokens",
            row.kl <= limits.kl and (same is None or same >= limits.decided_agreement),
            f"KL ≤ {limits.kl:g}, top-1 agreement ≥ {limits.decided_agreement:g} where dense "
            "finds a token twice as likely as any other",
            f"KL {row.kl:.4f} (worst at {worst.bucket}: {worst.kl:.4f}), "
            f"top-1 {row.top1_agreement:.3f}, "
            + ("nowhere decided" if same is None else f"where decided {same:.3f}"),
        )
        ratio = row.sparse_perplexity / row.dense_perplexity
        yield _check(
            f"perplexity at {row.length} tokens",
            ratio <= limits.perplexity_ratio,
            f"≤ {limits.perplexity_ratio:g} × dense",
            f"{row.dense_perplexity:.3f} → {row.sparse_perplexity:.3f} (× {ratio:.4f})",
        )
    for task in sorted({row.task for row in report.retrieval}):
        for length in sorted({r.length for r in report.retrieval if r.task == task}):
            rows = [r for r in report.retrieval if (r.task, r.length) == (task, length)]
            yield _retrieval(task, length, rows, limits)
    for agreement in report.greedy:
        yield Check(
            group="task",
            name=f"greedy continuation at {agreement.length} tokens",
            status="ok",
            expected=INFORMATION,
            found=f"{agreement.agreeing_prefix:.0%} of {agreement.num_tokens} tokens before the "
            f"first change, {agreement.num_prompts} prompts",
        )
    changed = [row for row in report.short if row.largest_difference > 0]
    tried = ", ".join(str(row.num_tokens) for row in report.short) or "none"
    if report.short:
        yield Check(
            group="task",
            name="short prompts",
            status="differs" if changed else "ok",
            expected=f"bit-equal to dense below {report.min_length} tokens",
            found=f"{len(changed)} of {len(report.short)} differ (lengths tried: {tried})",
            advice="short prompts must run dense: report a bug" if changed else "",
        )


def _retrieval(task: str, length: int, rows: list[Retrieval], limits: TaskLimits) -> Check:
    total = sum(row.num_prompts for row in rows)
    dense, ours = sum(r.dense_correct for r in rows), sum(r.sparse_correct for r in rows)
    by_depth = ", ".join(f"{row.depth:g}: {row.dense_correct}→{row.sparse_correct}" for row in rows)
    found = f"dense {dense}/{total}, sparse {ours}/{total} (by depth {by_depth})"
    if dense < limits.retrieval_floor * total:
        return Check(
            group="task",
            name=f"{task} at {length} tokens",
            status="cannot tell",
            expected=f"at least {limits.retrieval_floor:.0%} answered by dense attention",
            found=found,
            advice="this model can hardly do the task dense, so the task says nothing here",
        )
    return _check(
        f"{task} at {length} tokens",
        dense - ours <= max(1.0, limits.retrieval_drop * total),
        f"at most {limits.retrieval_drop:.0%} of the prompts lost, or one",
        found,
    )


def _check(name: str, ok: bool, expected: str, found: str) -> Check:
    status: Status = "ok" if ok else "differs"
    return Check(
        group="task",
        name=name,
        status=status,
        expected=expected,
        found=found,
        advice="" if ok else _ADVICE,
    )
