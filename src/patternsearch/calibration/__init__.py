# SPDX-License-Identifier: Apache-2.0
"""From a recipe to samples to scores: recipes, sources, packing, the run loop."""
