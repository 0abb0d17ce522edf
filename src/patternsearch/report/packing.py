# SPDX-License-Identifier: Apache-2.0
"""Arrays and documents inside a page: compact, exact about what is missing, and safe in HTML."""

import base64
import gzip
import json
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["compressed", "json_for_script", "pack_floats", "pack_fractions", "pack_integers"]

_LEVEL = 6
_MISSING = 65535
_STEPS = 65534


def compressed(data: bytes) -> str:
    """Return base64 of the gzipped bytes; the same bytes always give the same text."""
    return base64.b64encode(gzip.compress(data, compresslevel=_LEVEL, mtime=0)).decode("ascii")


def _packed(array: NDArray[Any], kind: str, scale: float = 1.0) -> dict[str, Any]:
    """Pack little-endian values; bytes of equal weight lie together, which compresses better."""
    width = array.dtype.itemsize
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    planes = np.frombuffer(little.tobytes(), dtype=np.uint8).reshape(-1, width).T
    return {
        "type": kind,
        "shape": list(array.shape),
        "scale": scale,
        "data": compressed(planes.tobytes()),
    }


def pack_floats(values: ArrayLike) -> dict[str, Any]:
    """Pack as float32; NaN stays NaN and means missing. Any shape."""
    return _packed(np.asarray(values, dtype=np.float32), "f32")


def pack_integers(values: ArrayLike) -> dict[str, Any]:
    """Pack as int16, any shape; callers use −1 for missing.

    Raises:
        OverflowError: a value does not fit.
    """
    array = np.asarray(values, dtype=np.int64)
    if array.size and (array.min() < -(2**15) or array.max() >= 2**15):
        raise OverflowError(f"{array.min()}..{array.max()} does not fit 16 bits")
    return _packed(array.astype(np.int16), "i16")


def pack_fractions(values: ArrayLike) -> dict[str, Any]:
    """Pack values ≥ 0 as 16-bit steps of their maximum (at least 1); NaN and inf are missing.

    The error is at most half a step: 8e-6 for masses and densities.
    """
    array = np.asarray(values, dtype=np.float64)
    known = np.isfinite(array)
    top = max(1.0, float(array[known].max(initial=0.0)))
    steps = np.full(array.shape, _MISSING, dtype=np.uint16)
    steps[known] = np.round(np.clip(array[known], 0.0, top) / top * _STEPS).astype(np.uint16)
    return _packed(steps, "u16", top / _STEPS)


def json_for_script(document: Any) -> str:
    """Return JSON that may stand inside a script element: no ``<``, ``>``, ``&`` or line separator.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def finite(value: float | None) -> float | None:
    """Return the value, or None if there is no number."""
    return None if value is None or not math.isfinite(value) else float(value)
