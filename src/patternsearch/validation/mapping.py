# SPDX-License-Identifier: Apache-2.0
"""The mapping level: does every head find itself? Rows of the table of checks."""

from patternsearch.runtime.fit import Status
from patternsearch.runtime.mapping import MappingReport
from patternsearch.validation.checks import Check

__all__ = ["cannot_map", "check_mapping"]

_ADVICE = {
    "swapped heads": "exchange the heads, or calibrate what the model has become",
    "permuted heads": "the checkpoint's heads were reordered: calibrate it, or restore the order",
    "shifted heads": "the head offset is wrong: entries are by global head",
    "tensor-parallel offset": "give rank r the heads from r · Hq / T on, not from 0",
    "kv groups permuted": "the kv heads were reordered: calibrate it, or restore the order",
    "gqa map": "query head h reads kv head h // (Hq / Hkv)",
    "layers permuted": "the layers were reordered: calibrate the model, or restore the order",
    "changed layers": "these layers hold other weights: calibrate the model",
}


def cannot_map(reason: str) -> Check:
    """Return the check that says why heads cannot be compared."""
    return Check(
        group="mapping",
        name="heads find themselves",
        status="cannot tell",
        expected="fingerprints of every head",
        found=reason,
        advice="calibrate the model to record them",
    )


def check_mapping(report: MappingReport) -> tuple[Check, ...]:
    """Judge a comparison of fingerprints."""
    num_heads = sum(len(layer.holders) for layer in report.layers)
    at_home = sum(
        place == head for layer in report.layers for place, head in enumerate(layer.holders)
    )
    checks = [
        Check(
            group="mapping",
            name=finding.kind,
            status="differs",
            expected="every head at its own place",
            found=finding.text,
            advice=_ADVICE[finding.kind],
        )
        for finding in report.findings
    ]
    if not report.findings and report.verdict != "different model":
        checks.append(
            Check(
                group="mapping",
                name="heads find themselves",
                status="ok",
                expected=f"{num_heads} heads at their own places",
                found=f"{at_home} heads at their own places",
            )
        )
    return (*checks, _weights(report))


def _weights(report: MappingReport) -> Check:
    status: Status
    if report.verdict == "same weights":
        status, advice = "ok", ""
    elif report.verdict == "different model":
        status, advice = "differs", "the patterns were found for other heads: calibrate this model"
    else:
        status, advice = "cannot tell", "--level quality measures whether they hold"
    lowest = min(report.layers, key=lambda layer: layer.similarity)
    departed = (
        f"; layers depart from layer {report.first_departure} on"
        if report.first_departure is not None
        else ""
    )
    return Check(
        group="mapping",
        name="weights by their heads",
        status=status,
        expected="same weights",
        found=f"{report.verdict} (similarity {report.similarity:.3f}, lowest "
        f"{lowest.similarity:.3f} in layer {lowest.layer}{departed})",
        advice=advice,
    )
