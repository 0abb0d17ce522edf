# SPDX-License-Identifier: Apache-2.0
"""Hold the identity that a config is bound to against a model's, field by field.

Two descriptions are compared, no model is touched: attaching a config and validating one use the
same rules. A field that either side does not know is said to be unknown, never taken to match.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from patternsearch.schema.config import ModelIdentity, Rope

__all__ = ["FREQUENCY_RTOL", "Comparison", "Status", "compare_identity", "structural"]

Status = Literal["ok", "differs", "cannot tell"]

FREQUENCY_RTOL = 1e-6
"""Inverse frequencies and factors are float32 results; a last-bit difference is no other RoPE."""

_STRUCTURE = (
    ("model_type", "model type"),
    ("num_layers", "layers"),
    ("num_query_heads", "query heads"),
    ("num_kv_heads", "kv heads"),
    ("head_dim", "head_dim"),
    ("sliding_window", "sliding window"),
    ("max_positions", "max positions"),
    ("vocab_size", "vocabulary size"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One field held against another.

    Attributes:
        name: what is compared, in the words of the documentation.
        status: ``cannot tell`` where one side does not know the value.
        expected: the config's value, for people.
        found: the model's value, for people.
        layers: layers that the difference is in, where it is in some of them.
        is_structural: a difference makes the entries meaningless for this model (shapes, RoPE,
            scale); the others (dtype, tokenizer, weights) may still fit.
    """

    name: str
    status: Status
    expected: str
    found: str
    layers: tuple[int, ...] = ()
    is_structural: bool = True


def compare_identity(expected: ModelIdentity, found: ModelIdentity) -> tuple[Comparison, ...]:
    """Compare every field that a config is bound to.

    Args:
        expected: the config's.
        found: the model's, weights and tokenizer possibly unknown.
    """
    return (
        _equal("architecture", expected.architecture, found.architecture),
        *(
            _equal(name, getattr(expected, field), getattr(found, field))
            for field, name in _STRUCTURE
        ),
        _layer_types(expected, found),
        _close("attention scale", expected.attention_scale, found.attention_scale),
        _equal("logit softcap", expected.logit_softcap, found.logit_softcap),
        *_ropes(expected.rope, found.rope),
        _equal("dtype of the weights", expected.dtype, found.dtype, structural=False),
        _known("tokenizer", expected.tokenizer_sha256, found.tokenizer_sha256),
        *_weights(expected, found),
    )


def structural(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the differences that make a config meaningless for the model."""
    return tuple(c for c in comparisons if c.status == "differs" and c.is_structural)


def _equal(name: str, expected: Any, found: Any, *, structural: bool = True) -> Comparison:
    status: Status = "ok" if expected == found else "differs"
    return Comparison(name, status, _text(expected), _text(found), is_structural=structural)


def _close(name: str, expected: float, found: float) -> Comparison:
    same = math.isclose(expected, found, rel_tol=FREQUENCY_RTOL)
    return Comparison(name, "ok" if same else "differs", f"{expected:.9g}", f"{found:.9g}")


def _known(name: str, expected: str | None, found: str | None) -> Comparison:
    if expected is None or found is None:
        shown = (_digest(expected), _digest(found))
        return Comparison(name, "cannot tell", *shown, is_structural=False)
    status: Status = "ok" if expected == found else "differs"
    return Comparison(name, status, _digest(expected), _digest(found), is_structural=False)


def _layer_types(expected: ModelIdentity, found: ModelIdentity) -> Comparison:
    pairs = zip(expected.layer_types, found.layer_types, strict=False)
    differing = tuple(layer for layer, (old, new) in enumerate(pairs) if old != new)
    same = expected.layer_types == found.layer_types
    return Comparison(
        "layer types",
        "ok" if same else "differs",
        _census(expected.layer_types),
        _census(found.layer_types),
        layers=differing,
    )


def _ropes(expected: dict[str, Rope], found: dict[str, Rope]) -> Iterator[Comparison]:
    if expected.keys() != found.keys():
        yield _equal(
            "RoPE: layer types", ", ".join(sorted(expected)) or "no RoPE",
            ", ".join(sorted(found)) or "no RoPE",
        )  # fmt: skip
    for kind in sorted(expected.keys() & found.keys()):
        prefix = "RoPE" if len(expected) == 1 else f"RoPE of {kind} layers"
        old, new = expected[kind], found[kind]
        yield _equal(f"{prefix}: type", old.rope_type, new.rope_type)
        # A field that is null says the same as one that is absent: libraries write either.
        names = {
            name for rope in (old, new) for name, v in rope.parameters.items() if v is not None
        }
        for name in sorted(names - {"rope_type", "type"}):
            yield _parameter(
                f"{prefix}: {name}", old.parameters.get(name), new.parameters.get(name)
            )
        yield _close(f"{prefix}: attention factor", old.attention_factor, new.attention_factor)
        yield _frequencies(f"{prefix}: inverse frequencies", old, new)


def _parameter(name: str, expected: Any, found: Any) -> Comparison:
    if isinstance(expected, int | float) and isinstance(found, int | float):
        same = math.isclose(expected, found, rel_tol=FREQUENCY_RTOL)
    else:
        same = expected == found
    return Comparison(name, "ok" if same else "differs", _text(expected), _text(found))


def _frequencies(name: str, expected: Rope, found: Rope) -> Comparison:
    old, new = expected.inverse_frequencies, found.inverse_frequencies
    if len(old) != len(new):
        return Comparison(name, "differs", f"{len(old)} values", f"{len(new)} values")
    errors = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(old, new, strict=True)]
    worst = max(errors, default=0.0)
    if worst <= FREQUENCY_RTOL:
        return Comparison(name, "ok", f"{len(old)} values", f"the same within {worst:.1g}")
    place = errors.index(worst)
    return Comparison(
        name,
        "differs",
        f"{len(old)} values; [{place}] = {old[place]:.6g}",
        f"{sum(e > FREQUENCY_RTOL for e in errors)} differ; [{place}] = {new[place]:.6g}",
    )


def _weights(expected: ModelIdentity, found: ModelIdentity) -> Iterator[Comparison]:
    if expected.weights_format != found.weights_format and expected.weights_sha256:
        # The same numbers stored in another format have other bytes.
        name = "weights"
        yield Comparison(
            name,
            "cannot tell",
            f"{_digest(expected.weights_sha256)} ({expected.weights_format})",
            f"{_digest(found.weights_sha256)} ({found.weights_format})",
            is_structural=False,
        )
        return
    yield _known("weights", expected.weights_sha256, found.weights_sha256)
    old, new = expected.attention_sha256, found.attention_sha256
    if not old or not new or len(old) != len(new):
        yield Comparison(
            "attention weights", "cannot tell", _layers_known(old), _layers_known(new),
            is_structural=False,
        )  # fmt: skip
        return
    changed = tuple(layer for layer, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    yield Comparison(
        "attention weights",
        "differs" if changed else "ok",
        f"{len(old)} layers",
        f"changed in layers {_ranges(changed)}" if changed else "the same in every layer",
        layers=changed,
        is_structural=False,
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ``0–3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)


def _census(types: Sequence[str]) -> str:
    names = sorted(set(types), key=list(types).index)
    return ", ".join(f"{types.count(name)} {name}" for name in names)


def _layers_known(digests: Sequence[str]) -> str:
    return f"{len(digests)} layers" if digests else "not computed"


def _digest(value: str | None) -> str:
    return "not computed" if value is None else value[:12]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
