# SPDX-License-Identifier: Apache-2.0
"""Measured kernel times: the timing table and the model that predicts from it."""
