# SPDX-License-Identifier: Apache-2.0
"""A recipe resolved for one run: which sources are used, and which sample comes from where.

Nothing is read here but the presence of packages, so a plan is cheap, and the same on every
machine that has the same packages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Literal

from pydantic import BaseModel, ConfigDict

from patternsearch.calibration.recipes import (
    STDLIB,
    PackageSource,
    Recipe,
    Source,
)
from patternsearch.errors import EnvironmentLacks, RecipeError
from patternsearch.schema.canonical import canonical_sha256

__all__ = ["LengthCounts", "ResolvedRecipe", "SkippedSource", "Slot", "plan_slots", "resolve"]

Split = Literal["calibration", "heldout"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LengthCounts(_Frozen):
    """Samples of one length, by split."""

    tokens: int
    calibration: int
    heldout: int


class SkippedSource(_Frozen):
    """An optional source that this machine lacks."""

    name: str
    reason: str


class ResolvedRecipe(_Frozen):
    """What a run really uses: arguments applied, optional sources decided."""

    name: str
    seed: int
    heldout_fraction: float
    chat_template: bool
    lengths: tuple[LengthCounts, ...]
    sources: tuple[Source, ...]
    skipped: tuple[SkippedSource, ...]

    @property
    def sha256(self) -> str:
        """Digest of the canonical JSON of this document."""
        return canonical_sha256(self.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class Slot:
    """One sample to be drawn.

    Attributes:
        sample_id: such as ``l4096-003-needle``; unique in the plan.
        source: the source it comes from.
        split: calibration or heldout.
        length: tokens.
        index: k, the number of this sample among those of its source, split and length.
    """

    sample_id: str
    source: Source
    split: Split
    length: int
    index: int


def resolve(
    recipe: Recipe,
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    seed: int | None = None,
) -> ResolvedRecipe:
    """Apply a run's arguments and find out which optional sources are there.

    Args:
        recipe: the recipe.
        lengths: tokens; None takes the recipe's. A length that the recipe does not have gets the
            smallest number of samples that the recipe has for any length.
        samples: calibration samples for every length; None takes the recipe's.
        seed: None takes the recipe's.

    Raises:
        RecipeError: an argument is out of range, or no source is left.
        EnvironmentLacks: a package that is not optional is missing.
    """
    if samples is not None and not 1 <= samples <= 10_000:
        raise RecipeError(f"{samples} samples per length: give 1 to 10000")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise RecipeError(f"seed {seed} is out of range: give 0 to 2^63 − 1")
    of_recipe = {plan.tokens: plan.samples for plan in recipe.lengths}
    fewest = min(of_recipe.values())
    chosen = sorted(of_recipe) if lengths is None else sorted(set(lengths))
    if not chosen:
        raise RecipeError("no length is given: name at least one, such as 4096")
    for length in chosen:
        if not 32 <= length <= 1 << 24:
            raise RecipeError(f"length {length} is out of range: give 32 to {1 << 24} tokens")
    counts = []
    for length in chosen:
        num_calibration = samples or of_recipe.get(length, fewest)
        counts.append(
            LengthCounts(
                tokens=length,
                calibration=num_calibration,
                heldout=_num_heldout(num_calibration, recipe.heldout_fraction),
            )
        )
    used, skipped = _present(recipe)
    if recipe.heldout_fraction > 0 and not any(source.heldout for source in used):
        raise RecipeError(
            f"recipe {recipe.name}: no source that allows held-out samples is left (skipped: "
            f"{', '.join(source.name for source in skipped)}): install them or set "
            "heldout_fraction to 0"
        )
    return ResolvedRecipe(
        name=recipe.name,
        seed=recipe.seed if seed is None else seed,
        heldout_fraction=recipe.heldout_fraction,
        chat_template=recipe.chat_template,
        lengths=tuple(counts),
        sources=used,
        skipped=skipped,
    )


def plan_slots(resolved: ResolvedRecipe) -> tuple[Slot, ...]:
    """Decide for every sample which source it comes from.

    Lengths ascend, calibration before held-out. In each split the sources share all samples of
    all lengths by weight, with Webster's rule: the next sample goes to the source with the largest
    weight / (2·given + 1), ties to the one that stands first. So after any number of samples the
    shares are the weights' rounded, and a longer length changes nothing in a shorter one.
    """
    given = {split: [0] * len(resolved.sources) for split in ("calibration", "heldout")}
    slots: list[Slot] = []
    for counts in resolved.lengths:
        number = 0
        splits: tuple[tuple[Split, int], ...] = (
            ("calibration", counts.calibration),
            ("heldout", counts.heldout),
        )
        for split, num_samples in splits:
            drawn = [0] * len(resolved.sources)
            for _ in range(num_samples):
                winner = _next_source(resolved.sources, given[split], split)
                source = resolved.sources[winner]
                slots.append(
                    Slot(
                        sample_id=f"l{counts.tokens}-{number:03d}-{source.name}",
                        source=source,
                        split=split,
                        length=counts.tokens,
                        index=drawn[winner],
                    )
                )
                given[split][winner] += 1
                drawn[winner] += 1
                number += 1
    return tuple(slots)


def _next_source(sources: tuple[Source, ...], given: list[int], split: Split) -> int:
    eligible = [i for i, s in enumerate(sources) if s.heldout or split == "calibration"]
    # Exact: weights are floats, and a quotient rounded differently would change the plan.
    return max(eligible, key=lambda i: (Fraction(sources[i].weight) / (2 * given[i] + 1), -i))


def _num_heldout(num_calibration: int, fraction: float) -> int:
    if fraction == 0:
        return 0
    exact = num_calibration * fraction / (1 - fraction)
    return max(1, math.floor(exact + 0.5))


def _present(recipe: Recipe) -> tuple[tuple[Source, ...], tuple[SkippedSource, ...]]:
    used: list[Source] = []
    skipped: list[SkippedSource] = []
    for source in recipe.sources:
        if not isinstance(source, PackageSource) or _is_installed(source.package):
            used.append(source)
        elif source.optional:
            skipped.append(
                SkippedSource(name=source.name, reason=f"package {source.package} is not installed")
            )
        else:
            raise EnvironmentLacks(
                f"source {source.name}: package {source.package} is not installed: install it, "
                "or mark the source optional: true"
            )
    if not used:
        raise RecipeError(
            f"recipe {recipe.name}: none of its sources is there "
            f"({'; '.join(source.reason for source in skipped)}): install one"
        )
    return tuple(used), tuple(skipped)


def _is_installed(package: str) -> bool:
    if package == STDLIB:
        return True
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
