# SPDX-License-Identifier: Apache-2.0
"""The score operation: masses of one layer in one pass."""
