# SPDX-License-Identifier: Apache-2.0
"""Sparse attention forward over exactly a pattern's physical set."""
