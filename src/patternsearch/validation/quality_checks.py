# SPDX-License-Identifier: Apache-2.0
"""What the quality measurement means: rows of the table of checks."""

from collections.abc import Iterator

from patternsearch.runtime.fit import Status
from patternsearch.validation.checks import INFORMATION, Check
from patternsearch.validation.quality_report import HeadQuality, QualityReport
from patternsearch.validation.remedies import MARGIN
from patternsearch.validation.samples import JudgingSamples
from patternsearch.validation.swaps import MASS_TOLERANCE

__all__ = ["check_quality"]

_NEW_SAMPLE_TOLERANCE = 0.05
"""A mean over other samples may lie this far below the record before it counts."""


def check_quality(
    report: QualityReport, judging: JudgingSamples, *, executed_as_scored: bool
) -> tuple[Check, ...]:
    """Judge the measurement.

    Args:
        report: the measurement.
        judging: what it was made on.
        executed_as_scored: the scored sets are those our runtime reads; not so for ``last_q``
            entries of other consumers.
    """
    return tuple(_checks(report, judging, executed_as_scored))


def _checks(
    report: QualityReport, judging: JudgingSamples, executed_as_scored: bool
) -> Iterator[Check]:
    yield _records(report, judging)
    yield _target(report)
    if executed_as_scored:
        yield _bound(report)
    worst = max(report.layers, key=lambda layer: layer.own_error)
    sharpest = min(report.heads, key=lambda head: head.cosine)
    yield Check(
        group="quality",
        name="output error, one layer sparse",
        status="ok",
        expected=INFORMATION,
        found=f"worst layer {worst.layer} at {worst.length}: relative L2 {worst.own_error:.3f}; "
        f"lowest cosine {sharpest.cosine:.3f} ({_place(sharpest)})",
    )
    yield Check(
        group="quality",
        name="output error, all layers sparse",
        status="ok",
        expected=INFORMATION,
        found="; ".join(
            f"{length} tokens: {error:.3f}" for length, error in sorted(report.final_error.items())
        ),
    )
    gap = max(report.heads, key=lambda head: head.index_gap)
    yield Check(
        group="quality",
        name="index gap",
        status="ok",
        expected=INFORMATION,
        found=f"mean {_mean_gap(report):.4f}, largest {gap.index_gap:.4f} ({_place(gap)})",
    )


def _records(report: QualityReport, judging: JudgingSamples) -> Check:
    known = [head for head in report.heads if head.recorded_mass is not None]
    if not known:
        return Check(
            group="quality",
            name="captured mass against the record",
            status="cannot tell",
            expected="recorded masses",
            found="the config has none for these samples",
            advice="an imported config has no record: judge it by the target and the output error",
        )
    faults = [(head, _departure(head, judging)) for head in known]
    faults = [(head, by) for head, by in faults if by > 0]
    if not faults:
        worst = max(known, key=lambda h: abs((h.recorded_mass or 0.0) - h.mass))
        return Check(
            group="quality",
            name="captured mass against the record",
            status="ok",
            expected="the recorded means",
            found=f"{len(known)} heads agree; farthest "
            f"{(worst.recorded_mass or 0.0):.4f} → {worst.mass:.4f} ({_place(worst)})",
        )
    faults.sort(key=lambda item: -item[1])
    shown = "; ".join(
        f"{_place(head)}: {head.recorded_mass:.4f} → {head.mass:.4f}" for head, _ in faults[:4]
    )
    more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
    advice = (
        "; ".join(report.swapped[:4]) + ": exchange them back"
        if report.swapped
        else "the weights, the RoPE or the entries are not those of the calibration: see the "
        "identity and mapping checks, then calibrate again"
    )
    return Check(
        group="quality",
        name="captured mass against the record",
        status="differs",
        expected="the recorded means",
        found=shown + more,
        advice=advice,
    )


def _departure(head: HeadQuality, judging: JudgingSamples) -> float:
    """Return by how much a head departs from its record beyond what is allowed; 0 if it fits."""
    assert head.recorded_mass is not None
    if head.length in judging.complete_lengths:
        return max(0.0, abs(head.recorded_mass - head.mass) - MASS_TOLERANCE)
    return max(0.0, head.recorded_mass - head.mass - _NEW_SAMPLE_TOLERANCE)


def _target(report: QualityReport) -> Check:
    if report.target_mass is None:
        return Check(
            group="quality",
            name="target mass",
            status="cannot tell",
            expected="a target in the config",
            found="the config records none",
            advice="compare the worst heads by eye, or calibrate with --target-mass",
        )
    target = report.target_mass
    below = [head for head in report.heads if head.worst_region < target - MARGIN]
    lowest = min(report.heads, key=lambda head: head.worst_region)
    found = f"lowest {lowest.worst_region:.4f} ({_place(lowest)})"
    status: Status = "ok"
    advice = ""
    if below:
        found = f"{len(below)} of {len(report.heads)} heads below; {found}"
        status = "differs"
        mended = "; ".join(
            f"layer {r.layer} head {r.head}: {r.mended} gives {r.mended_worst_region:.4f}"
            for r in report.remedies[:3]
        )
        advice = f"give them more: {mended}" if mended else "select with a higher --target-mass"
    return Check(
        group="quality",
        name="target mass in the worst region",
        status=status,
        expected=f"at least {target:g} (less {MARGIN:g} on new samples)",
        found=found,
        advice=advice,
    )


def _bound(report: QualityReport) -> Check:
    worst = max(report.heads, key=lambda head: head.error_over_bound)
    ok = worst.error_over_bound <= 1.0
    return Check(
        group="quality",
        name="output error explained by lost mass",
        status="ok" if ok else "differs",
        expected="mean row error ≤ 2 · (1 − mass) · max ‖v‖, and rounding",
        found=f"at most {worst.error_over_bound:.2f} of that bound ({_place(worst)})",
        advice="" if ok else "the attention that runs is not the one that was scored: report a bug",
    )


def _mean_gap(report: QualityReport) -> float:
    return sum(head.index_gap for head in report.heads) / len(report.heads)


def _place(head: HeadQuality) -> str:
    return f"layer {head.layer} head {head.head}, {head.length} tokens"
