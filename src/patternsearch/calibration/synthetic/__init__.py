# SPDX-License-Identifier: Apache-2.0
"""Synthetic long-context tasks: a prompt of an exact number of tokens and its right answer."""

from patternsearch.calibration.synthetic.tasks import TaskPrompt, build_task, spread_depth

__all__ = ["TaskPrompt", "build_task", "spread_depth"]
