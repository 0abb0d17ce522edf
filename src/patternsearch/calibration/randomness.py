# SPDX-License-Identifier: Apache-2.0
"""Random choices that are a pure function of a key, the same on every platform and version."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["KeyedRandom", "key_digest"]

T = TypeVar("T")


def key_digest(*parts: str | int) -> bytes:
    """Return the SHA-256 of the parts; parts that differ anywhere give another digest."""
    joined = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).digest()


class KeyedRandom:
    """A stream of choices that depends on its key alone.

    The bits are SHA-256 of key and counter; every method is integer arithmetic on them. Nothing
    here relies on the sampling algorithms of :mod:`random` or NumPy, which may change.

    Args:
        key: any strings and integers.
    """

    def __init__(self, *key: str | int) -> None:
        self._words = _words(key_digest(*key))

    def below(self, bound: int) -> int:
        """Return an integer in [0, bound)."""
        assert bound > 0
        return (next(self._words) * bound) >> 64

    def between(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        return low + self.below(high - low + 1)

    def fraction(self) -> float:
        """Return a float in [0, 1), a multiple of 2⁻⁵³."""
        return (next(self._words) >> 11) * 2.0**-53

    def choice(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return ``count`` items at distinct positions, in random order."""
        pool = list(items)
        assert count <= len(pool)
        for i in range(count):
            j = i + self.below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]

    def hexadecimal(self, digits: int) -> str:
        """Return ``digits`` random hexadecimal digits."""
        return "".join("0123456789abcdef"[self.below(16)] for _ in range(digits))

    def uuid(self) -> str:
        """Return text in the form of a version 4 UUID."""
        groups = self.hexadecimal(8), self.hexadecimal(4), self.hexadecimal(3)
        variant = "89ab"[self.below(4)] + self.hexadecimal(3)
        return f"{groups[0]}-{groups[1]}-4{groups[2]}-{variant}-{self.hexadecimal(12)}"


def _words(key: bytes) -> Iterator[int]:
    counter = 0
    while True:
        block = hashlib.sha256(key + counter.to_bytes(8, "little")).digest()
        for start in range(0, 32, 8):
            yield int.from_bytes(block[start : start + 8], "little")
        counter += 1
