# SPDX-License-Identifier: Apache-2.0
"""The entries that every pattern of a kind holds whatever its budget; budgets count them."""

__all__ = ["FORCED_COLUMNS", "FORCED_DIAGONALS", "FORCED_SLASHES"]

FORCED_COLUMNS = 30
"""Columns j = 0..29 are in every Vertical-Slash set (MInference's runtime rule)."""

FORCED_SLASHES = 100
"""Offsets δ = 0..99 are in every ``last_q`` set (MInference's runtime rule)."""

FORCED_DIAGONALS = 2
"""Tile diagonals 0 and 1 are in every ``spread`` set."""
