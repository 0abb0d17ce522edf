# SPDX-License-Identifier: Apache-2.0
"""Field by field differences of two parts of a config, short enough to read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from patternsearch.schema.config import Calibration, SampleRecord

__all__ = ["FieldChange", "compare_calibration", "compare_fields"]

_LONG = 8
"""Lists longer than this are summarised."""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs; long lists are summarised in words.

    Attributes:
        name: dotted path.
        a, b: the values as plain JSON values; None also where a side has no such field.
    """

    name: str
    a: Any
    b: Any


def compare_fields(
    a: BaseModel | None, b: BaseModel | None, *, prefix: str = "", skip: tuple[str, ...] = ()
) -> tuple[FieldChange, ...]:
    """Return the fields that differ between two models of one class, or none and one."""
    if a is None or b is None:
        if a is b:
            return ()
        given = [None if side is None else "given" for side in (a, b)]
        return (FieldChange(prefix or "all", *given),)
    if a == b:
        return ()
    exclude = set(skip)
    first, second = (side.model_dump(mode="json", exclude=exclude) for side in (a, b))
    return tuple(_compare(first, second, prefix))


def compare_calibration(a: Calibration | None, b: Calibration | None) -> tuple[FieldChange, ...]:
    """Return the fields of calibration that differ; samples are compared as sets."""
    changes = compare_fields(a, b, skip=("samples",), prefix="calibration" if not (a and b) else "")
    if a is None or b is None:
        return changes
    first, second = ({_key(s) for s in side.samples} for side in (a, b))
    if first == second:
        return changes
    common = len(first & second)
    words = [f"{len(side)} samples, {common} of them in both" for side in (first, second)]
    return (*changes, FieldChange("samples", *words))


def _key(sample: SampleRecord) -> tuple[str, str, int]:
    return sample.sha256, sample.split, sample.length


def _compare(a: Any, b: Any, name: str) -> Iterator[FieldChange]:
    if a == b and type(a) is type(b):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in (*a, *(key for key in b if key not in a)):
            inner = f"{name}.{key}" if name else key
            yield from _compare(a.get(key), b.get(key), inner)
    elif isinstance(a, list) and isinstance(b, list) and max(len(a), len(b)) > _LONG:
        yield FieldChange(name, *_summaries(a, b))
    elif a != b:
        yield FieldChange(name, a, b)


def _summaries(a: list[Any], b: list[Any]) -> tuple[str, str]:
    if len(a) != len(b):
        return f"{len(a)} items", f"{len(b)} items"
    at = [index for index, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    places = ", ".join(map(str, at[:_LONG])) + (", ..." if len(at) > _LONG else "")
    words = f"{len(at)} of {len(a)} differ, at {places}"
    if isinstance(a[at[0]], dict | list):
        return words, words
    return f"{words}: {a[at[0]]}", f"{words}: {b[at[0]]}"
