# SPDX-License-Identifier: Apache-2.0
"""Does a config still fit a model, and is it still good: from digests to whole-model runs."""
