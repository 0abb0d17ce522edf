# SPDX-License-Identifier: Apache-2.0
"""The identity level: is this the model, with the RoPE and the weights, that was calibrated?

Needs no model in memory: everything comes from file headers, ``config.json`` and digests.
"""

from patternsearch.errors import InputError
from patternsearch.model.tensor_parallel import rank_slices
from patternsearch.runtime.fit import Comparison, compare_identity
from patternsearch.schema.config import ModelIdentity, PatternConfig, RankSlice
from patternsearch.validation.checks import Check

__all__ = ["check_identity", "check_tensor_parallel"]

_RECALIBRATE = "calibrate this model"
_ADVICE = {
    "architecture": "name the model that was calibrated, or " + _RECALIBRATE,
    "attention scale": "q·k is scaled otherwise, so every mass changes: " + _RECALIBRATE,
    "max positions": "check rope_scaling and max_position_embeddings in config.json",
    "vocabulary size": "tokens were added or this is another model: check the checkpoint",
    "dtype of the weights": "the same weights in another dtype pass the mapping level",
    "tokenizer": "prompts become other tokens: restore the tokenizer, or " + _RECALIBRATE,
    "weights": "see which layers changed; --level mapping says whether the patterns plausibly hold",
    "attention weights": "run --level mapping, then --level quality; " + _RECALIBRATE
    + " if they disagree",
}  # fmt: skip
_UNKNOWN = {
    "weights": "digests compare only within one storage format and when they are computed; "
    "--level mapping compares the heads themselves",
    "attention weights": "--level mapping compares the heads themselves",
    "tokenizer": "the config or the checkpoint has no tokenizer digest",
}


def check_identity(
    config: PatternConfig, found: ModelIdentity, *, weights: bool = True
) -> tuple[Check, ...]:
    """Compare every field that the config is bound to.

    Args:
        config: the config.
        found: the model's description.
        weights: False means that digests were left out on purpose, and the advice says so.
    """
    return tuple(_check(c, weights) for c in compare_identity(config.model, found))


def _check(comparison: Comparison, weights: bool) -> Check:
    name = comparison.name
    if comparison.status == "ok":
        advice = ""
    elif comparison.status == "cannot tell":
        skipped = not weights and name in ("weights", "attention weights")
        advice = "skipped by --no-weights" if skipped else _UNKNOWN[name]
    elif name.startswith("RoPE"):
        advice = (
            "positions turn q and k otherwise than in calibration: restore the rope parameters "
            "of config.json, or " + _RECALIBRATE
        )
    else:
        advice = _ADVICE.get(name, "the entries are for another shape: " + _RECALIBRATE)
    return Check(
        group="identity",
        name=name,
        status=comparison.status,
        expected=comparison.expected,
        found=comparison.found,
        advice=advice,
    )


def check_tensor_parallel(
    config: PatternConfig, found: ModelIdentity, size: int
) -> tuple[Check, ...]:
    """Check that the model's heads can be laid out over ``size`` ranks as the config says.

    Args:
        config: the config.
        found: the model's description.
        size: tensor-parallel size of the deployment.
    """
    num_query, num_kv = found.num_query_heads, found.num_kv_heads
    try:
        slices = rank_slices(num_query, num_kv, size)
    except InputError:
        return (
            Check(
                group="tensor parallel",
                name=f"heads over {size} ranks",
                status="differs",
                expected=f"a size that divides {num_query} query heads, and divides or is a "
                f"multiple of {num_kv} kv heads",
                found=f"{size}: {num_query} % {size} = {num_query % size}, "
                f"{num_kv} % {size} = {num_kv % size}",
                advice=f"use one of {', '.join(map(str, _sizes(num_query, num_kv)))} ranks",
            ),
        )
    copies = max(1, size // num_kv)
    checks = [
        Check(
            group="tensor parallel",
            name=f"heads over {size} rank{'s' if size > 1 else ''}",
            status="ok",
            expected=f"{num_query // size} query heads a rank",
            found="; ".join(_slice_text(part) for part in slices[:8]) + ("; …" if size > 8 else ""),
        ),
        Check(
            group="tensor parallel",
            name="kv heads",
            status="ok",
            expected=f"{num_kv} kv heads",
            found="split over the ranks" if copies == 1 else f"each on {copies} ranks",
        ),
    ]
    recorded = config.tensor_parallel
    if recorded.size == size:
        same = [_layout(part) for part in recorded.ranks] == [_layout(part) for part in slices]
        checks.append(
            Check(
                group="tensor parallel",
                name="recorded layout",
                status="ok" if same else "differs",
                expected="; ".join(_slice_text(part) for part in recorded.ranks[:8]),
                found="; ".join(_slice_text(part) for part in slices[:8]),
                advice="" if same else "run `patternsearch select --tp-size` again",
            )
        )
    elif recorded.size != 1:
        checks.append(
            Check(
                group="tensor parallel",
                name="recorded layout",
                status="cannot tell",
                expected=f"balanced for {recorded.size} ranks",
                found=f"{size} ranks",
                advice="entries are global, so the config runs; its balance was for another size",
            )
        )
    return tuple(checks)


def _layout(part: RankSlice) -> tuple[int, tuple[int, int], tuple[int, int]]:
    return part.rank, part.query_heads, part.kv_heads


def _slice_text(part: RankSlice) -> str:
    return (
        f"rank {part.rank}: query {part.query_heads[0]}–{part.query_heads[1] - 1}, "
        f"kv {part.kv_heads[0]}–{part.kv_heads[1] - 1}"
    )


def _sizes(num_query: int, num_kv: int) -> list[int]:
    """Return the tensor-parallel sizes that work."""
    return [
        size
        for size in range(1, num_query + 1)
        if num_query % size == 0 and (num_kv % size == 0 or size % num_kv == 0)
    ]
