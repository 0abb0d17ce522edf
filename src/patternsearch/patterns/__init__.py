# SPDX-License-Identifier: Apache-2.0
"""The pattern kinds and their exact geometry; needs no torch."""
