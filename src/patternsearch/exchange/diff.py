# SPDX-License-Identifier: Apache-2.0
"""The difference of two configs by meaning: identity, calibration, selection, then every head.

Order of keys, float formatting, comments and versions of tools are no difference. Different
shapes are reported and not zipped. Scores of different kinds are never subtracted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from patternsearch.exchange.fields import FieldChange, compare_calibration, compare_fields
from patternsearch.exchange.ranks import Heads
from patternsearch.exchange.sides import Side, load_sides
from patternsearch.patterns.candidates import Candidate
from patternsearch.schema.config import HeadAtLength, HeadEntry, PatternConfig
from patternsearch.schema.reading import collector_paused

__all__ = ["Diff", "FailOn", "HeadChange", "LayerChange", "Totals", "diff_files", "diff_sides"]

FailOn = Literal["any", "pattern", "budget", "identity", "never"]


@dataclass(frozen=True, slots=True)
class HeadChange:
    """One head that differs.

    Attributes:
        layer, head: global numbers.
        what: ``pattern``: another kind; ``budget``: the same kind with other parameters;
            ``numbers``: the same pattern, other masses, density or time.
        a, b: the patterns; None for a layer that has no heads on that side.
        score: worst-region mass at the common length, or the file's score, of both sides; None
            where there is none or where the sides cannot be compared.
        density, predicted_ms: of both sides at the common length.
        is_stale: pattern or budget changed and every score stayed the same to the last digit, so
            the scores cannot belong to both.
    """

    layer: int
    head: int
    what: Literal["pattern", "budget", "numbers"]
    a: Candidate | None
    b: Candidate | None
    score: tuple[float | None, float | None]
    density: tuple[float | None, float | None]
    predicted_ms: tuple[float | None, float | None]
    is_stale: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of one side, or of one layer of it, at the common length.

    Attributes:
        kinds: number of heads by pattern kind.
        density: mean over heads; None if unknown for one.
        predicted_ms: sum over heads; None if unknown for one.
        score: mean over heads of worst-region mass or file score; None if unknown for one.
    """

    kinds: dict[str, int]
    density: float | None
    predicted_ms: float | None
    score: float | None


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer that differs, with the totals of both sides."""

    layer: int
    num_pattern: int
    num_budget: int
    num_numbers: int
    num_stale: int
    a: Totals
    b: Totals
    heads: tuple[HeadChange, ...]

    @property
    def moved(self) -> tuple[int, float]:
        """How much the layer moved: heads of another pattern or budget, then change of density."""
        densities = (self.a.density, self.b.density)
        change = 0.0 if None in densities else abs(densities[0] - densities[1])  # type: ignore[operator]
        return self.num_pattern + self.num_budget, change


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences of two sides.

    Attributes:
        a, b: name, kind and SHA-256 of the file of each side.
        identity, calibration, selection, tensor_parallel: changed fields.
        provenance: changed versions; information, no difference.
        shape: (layers, heads) of each side.
        length: the longest length that both sides were calibrated at; None if there is none.
        score_kind: of each side.
        is_score_comparable: whether scores of the two sides mean the same.
        layers: those that differ; empty if the shapes do.
        totals: of each side.
        notes: what a reader must know, one sentence each.
    """

    a: tuple[str, str, str]
    b: tuple[str, str, str]
    identity: tuple[FieldChange, ...]
    calibration: tuple[FieldChange, ...]
    selection: tuple[FieldChange, ...]
    tensor_parallel: tuple[FieldChange, ...]
    provenance: tuple[FieldChange, ...]
    shape: tuple[tuple[int, int], tuple[int, int]]
    length: int | None
    score_kind: tuple[str, str]
    is_score_comparable: bool
    layers: tuple[LayerChange, ...]
    totals: tuple[Totals, Totals]
    notes: tuple[str, ...]

    @property
    def has_same_shape(self) -> bool:
        """Whether heads could be compared one by one."""
        return self.shape[0] == self.shape[1]

    def count(self, what: Literal["pattern", "budget", "numbers", "stale"]) -> int:
        """Count the heads of one sort of change."""
        return sum(getattr(layer, f"num_{what}") for layer in self.layers)

    def most_moved(self, limit: int = 5) -> tuple[LayerChange, ...]:
        """Return the layers that moved most."""
        moved = [layer for layer in self.layers if layer.moved > (0, 0.0)]
        return tuple(sorted(moved, key=lambda layer: layer.moved, reverse=True)[:limit])

    def differs(self, on: FailOn = "any") -> bool:
        """Return whether there is a difference of the sort that the user minds.

        ``identity``: model, fingerprints, tensor-parallel layout or shape. ``pattern``: another
        kind for some head, or another shape. ``budget``: that, or another budget. ``any``: all
        of these, other provenance of calibration or selection, and other numbers.
        """
        is_shape = not self.has_same_shape
        is_identity = bool(self.identity or self.tensor_parallel) or is_shape
        is_pattern = is_shape or self.count("pattern") > 0
        is_budget = is_pattern or self.count("budget") > 0
        is_any = (
            is_identity
            or is_budget
            or bool(self.calibration or self.selection)
            or self.count("numbers") > 0
            or self.score_kind[0] != self.score_kind[1]
        )
        return {
            "any": is_any,
            "pattern": is_pattern,
            "budget": is_budget,
            "identity": is_identity,
            "never": False,
        }[on]


def diff_files(a: Path, b: Path) -> Diff:
    """Load and compare two files (see :func:`patternsearch.exchange.sides.load_sides`)."""
    with collector_paused():
        return diff_sides(*load_sides(a, b))


def diff_sides(a: Side, b: Side) -> Diff:
    """Compare two sides."""
    shape = (_shape(a.heads), _shape(b.heads))
    length = _common_length(a.heads, b.heads)
    is_comparable = a.score_kind == b.score_kind
    layers: tuple[LayerChange, ...] = ()
    if shape[0] == shape[1]:
        layers = tuple(_layer_changes(a.heads, b.heads, length, is_comparable))
    fields = _Fields(a.config, b.config)
    return Diff(
        a=(a.name, a.kind, a.file_sha256),
        b=(b.name, b.kind, b.file_sha256),
        identity=fields.identity(),
        calibration=fields.calibration(),
        selection=fields.of("selection"),
        tensor_parallel=fields.of("tensor_parallel"),
        provenance=fields.of("provenance"),
        shape=shape,
        length=length,
        score_kind=(a.score_kind, b.score_kind),
        is_score_comparable=is_comparable,
        layers=layers,
        totals=(_totals(_flat(a.heads), length), _totals(_flat(b.heads), length)),
        notes=tuple(_notes(a, b, shape, length, layers)),
    )


def _flat(heads: Heads) -> list[HeadEntry]:
    return [head for layer in heads for head in layer or ()]


def _shape(heads: Heads) -> tuple[int, int]:
    return len(heads), max((len(layer) for layer in heads if layer is not None), default=0)


def _common_length(a: Heads, b: Heads) -> int | None:
    return max(_lengths(a) & _lengths(b), default=None)


def _lengths(heads: Heads) -> set[int]:
    return {at.length for head in _flat(heads)[:1] for at in head.lengths}


def _at(head: HeadEntry, length: int | None) -> HeadAtLength | None:
    return next((x for x in head.lengths if x.length == length), None)


def _value(at: HeadAtLength | None, name: Literal["density", "predicted_ms"]) -> float | None:
    return None if at is None else getattr(at, name)


def _score(head: HeadEntry, at: HeadAtLength | None) -> float | None:
    return at.mass_worst_region if at is not None else head.imported_score


def _layer_changes(
    a: Heads, b: Heads, length: int | None, is_comparable: bool
) -> Iterable[LayerChange]:
    for layer, (first, second) in enumerate(zip(a, b, strict=True)):
        if first == second:
            continue
        changes = [
            change
            for head, pair in enumerate(zip_longest(first or (), second or ()))
            if (change := _head_change(layer, head, *pair, length, is_comparable)) is not None
        ]
        if not changes:
            continue
        counts = Counter(change.what for change in changes)
        yield LayerChange(
            layer=layer,
            num_pattern=counts["pattern"],
            num_budget=counts["budget"],
            num_numbers=counts["numbers"],
            num_stale=sum(change.is_stale for change in changes),
            a=_totals(first or (), length),
            b=_totals(second or (), length),
            heads=tuple(changes),
        )


def _head_change(
    layer: int,
    head: int,
    a: HeadEntry | None,
    b: HeadEntry | None,
    length: int | None,
    is_comparable: bool,
) -> HeadChange | None:
    if a is None or b is None:
        # A layer that is full attention on one side only.
        nothing = (None, None)
        return HeadChange(
            layer, head, "pattern", _pattern(a), _pattern(b),
            nothing, nothing, nothing, False,
        )  # fmt: skip
    first, second = _at(a, length), _at(b, length)
    is_same_score = _all_scores(a) == _all_scores(b)
    if a.pattern == b.pattern:
        if not is_comparable or (a.lengths == b.lengths and is_same_score):
            return None
        what: Literal["pattern", "budget", "numbers"] = "numbers"
    else:
        what = "budget" if a.pattern.kind == b.pattern.kind else "pattern"
    return HeadChange(
        layer=layer,
        head=head,
        what=what,
        a=a.pattern,
        b=b.pattern,
        score=(_score(a, first), _score(b, second)) if is_comparable else (None, None),
        density=(_value(first, "density"), _value(second, "density")),
        predicted_ms=(_value(first, "predicted_ms"), _value(second, "predicted_ms")),
        is_stale=what != "numbers" and is_comparable and is_same_score and _is_telling(a),
    )


def _pattern(head: HeadEntry | None) -> Candidate | None:
    return None if head is None else head.pattern


def _all_scores(head: HeadEntry) -> tuple[float, ...]:
    masses = tuple(x for at in head.lengths for x in (at.mass_mean, at.mass_worst_region))
    return masses if head.imported_score is None else (*masses, head.imported_score)


def _is_telling(head: HeadEntry) -> bool:
    """Whether another pattern would not have the same scores by chance, as two full masses may."""
    return head.imported_score is not None or any(mass < 1.0 for mass in _all_scores(head))


def _totals(heads: Iterable[HeadEntry], length: int | None) -> Totals:
    heads = list(heads)
    at = [_at(head, length) for head in heads]
    densities = [x.density for x in at if x is not None]
    times = [x.predicted_ms for x in at if x is not None and x.predicted_ms is not None]
    scores = [s for head, x in zip(heads, at, strict=True) if (s := _score(head, x)) is not None]

    def if_complete(values: list[float], total: float) -> float | None:
        return total if heads and len(values) == len(heads) else None

    count = max(1, len(heads))
    return Totals(
        kinds=dict(sorted(Counter(head.pattern.kind for head in heads).items())),
        density=if_complete(densities, sum(densities) / count),
        predicted_ms=if_complete(times, sum(times)),
        score=if_complete(scores, sum(scores) / count),
    )


class _Fields:
    """Field changes of the parts of two configs; nothing where a side has no config."""

    def __init__(self, a: PatternConfig | None, b: PatternConfig | None) -> None:
        self._pair = (a, b) if a is not None and b is not None else None

    def identity(self) -> tuple[FieldChange, ...]:
        if self._pair is None:
            return ()
        a, b = self._pair
        model = compare_fields(a.model, b.model, skip=("reference",))
        return model + compare_fields(a.fingerprints, b.fingerprints, prefix="fingerprints")

    def calibration(self) -> tuple[FieldChange, ...]:
        if self._pair is None:
            return ()
        a, b = self._pair
        return compare_calibration(a.calibration, b.calibration) + compare_fields(
            a.imported, b.imported, prefix="imported"
        )

    def of(
        self, part: Literal["selection", "tensor_parallel", "provenance"]
    ) -> tuple[FieldChange, ...]:
        if self._pair is None:
            return ()
        a, b = self._pair
        return compare_fields(getattr(a, part), getattr(b, part))


def _notes(
    a: Side,
    b: Side,
    shape: tuple[tuple[int, int], tuple[int, int]],
    length: int | None,
    layers: tuple[LayerChange, ...],
) -> Iterable[str]:
    if shape[0] != shape[1]:
        yield (
            f"the shapes differ, {shape[0][0]} layers × {shape[0][1]} heads against "
            f"{shape[1][0]} × {shape[1][1]}: heads were not compared"
        )
    bare = [side.name for side in (a, b) if side.config is None]
    if bare:
        yield (
            f"{' and '.join(bare)} {'is' if len(bare) == 1 else 'are'} bare pattern files without "
            "metadata: identity, calibration and selection were not compared"
        )
    for side in (a, b):
        if side.kind == "edited export":
            yield f"{side.name} was edited by hand since its export: {len(side.edited)} heads"
    if a.score_kind != b.score_kind:
        yield f"the scores cannot be compared: {a.score_kind} against {b.score_kind}"
    elif length is None and _lengths(a.heads):
        yield "no calibrated length in common: masses, densities and times were not compared"
    if stale := sum(layer.num_stale for layer in layers):
        yield (
            f"{stale} heads changed pattern or budget while their scores are identical: the "
            "scores of one side are stale"
        )
