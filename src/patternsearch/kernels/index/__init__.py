# SPDX-License-Identifier: Apache-2.0
"""Online indices: which columns, diagonals and tiles a head would choose."""
