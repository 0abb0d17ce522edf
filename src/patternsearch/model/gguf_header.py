# SPDX-License-Identifier: Apache-2.0
"""The header of a ``.gguf`` file: where each field and each tensor lies.

Only positions are read, not values, so a vocabulary of a hundred thousand strings costs
milliseconds. Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from patternsearch.errors import ModelError

__all__ = ["GgufHeader", "GgufTensor", "read_gguf_header"]

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_DEFAULT_ALIGNMENT = 32

_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
}
"""ggml type number: name, values in a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's name, ggml type, shape as stored (fastest axis first), and place in the file."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Byte ranges [first, past the last) of the fields (type and value) and all tensors."""

    fields: dict[str, tuple[int, int]]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a ``.gguf`` file.

    Raises:
        ModelError: If it is no GGUF file of a known version, is damaged, or is truncated.
    """
    try:
        with (
            path.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(data).header()
    except (ValueError, struct.error, KeyError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} is no usable GGUF file ({error}); fetch the file again") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3 are known")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        fields: dict[str, tuple[int, int]] = {}
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_fields):
            name = self._string()
            first = self._at
            kind = self._number("<I")
            if name == "general.alignment" and kind == _UINT32:
                (alignment,) = struct.unpack_from("<I", self._data, self._at)
            self._skip(kind)
            fields[name] = (first, self._at)
        if alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        found = [self._tensor() for _ in range(num_tensors)]
        base = -(-self._at // alignment) * alignment
        tensors = tuple(
            GgufTensor(name, kind, shape, base + offset, size)
            for name, kind, shape, offset, size in found
        )
        end = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
        if end > len(self._data):
            raise ValueError(
                f"it has {len(self._data):,} bytes but its header describes {end:,}: truncated"
            )
        return GgufHeader(fields, tensors)

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _string(self) -> str:
        length = self._number("<Q")
        first = self._advance(length)
        return self._data[first : self._at].decode()

    def _advance(self, size: int) -> int:
        """Move past ``size`` bytes and return where they begin."""
        first = self._at
        if size > len(self._data) - first:
            raise ValueError("its header ends early")
        self._at += size
        return first

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._advance(self._number("<Q"))
        elif kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in _SCALAR_BYTES:
                self._advance(count * _SCALAR_BYTES[inner])
            elif inner == _STRING:
                for _ in range(count):
                    self._advance(self._number("<Q"))
            else:
                raise ValueError(f"it has an array of type {inner}")
        else:
            self._advance(_SCALAR_BYTES[kind])

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > 8:
            raise ValueError(f"the tensor {name} has {dimensions} axes")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind = self._number("<I")
        offset = self._number("<Q")
        if kind not in _TENSOR_TYPES:
            raise ValueError(f"the tensor {name} has the unknown ggml type {kind}")
        type_name, block, size = _TENSOR_TYPES[kind]
        count = 1
        for length in shape:
            count *= length
        if count % block:
            raise ValueError(f"the tensor {name} is not whole blocks of {block}")
        return name, type_name, shape, offset, count // block * size
