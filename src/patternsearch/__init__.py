# SPDX-License-Identifier: Apache-2.0
"""patternsearch: decide, prove and keep honest the sparse-attention pattern of every head."""

from patternsearch._version import __version__

__all__ = ["__version__"]
