# SPDX-License-Identifier: Apache-2.0
"""A fixed pseudo-random token sequence, the same on every platform and library version."""

import hashlib

from patternsearch.errors import InputError

__all__ = ["probe_token_ids"]


def probe_token_ids(seed: int, vocab_size: int, num_tokens: int) -> list[int]:
    """Return ``num_tokens`` ids in 0..vocab_size − 1 drawn by counter from a seed.

    Token t is the first 8 bytes (little-endian) of SHA-256 of ``patternsearch-probe:SEED:t``,
    modulo the vocabulary size.

    Raises:
        InputError: If the vocabulary or the length is empty.
    """
    if vocab_size < 1 or num_tokens < 1:
        raise InputError(
            f"a probe of {num_tokens} tokens from a vocabulary of {vocab_size} is empty; both "
            "must be at least 1"
        )
    return [
        int.from_bytes(
            hashlib.sha256(f"patternsearch-probe:{seed}:{position}".encode()).digest()[:8],
            "little",
        )
        % vocab_size
        for position in range(num_tokens)
    ]
