# SPDX-License-Identifier: Apache-2.0
"""The documents: config, scores folder, canonical input and output; needs no torch."""
