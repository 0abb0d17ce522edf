# SPDX-License-Identifier: Apache-2.0
"""Sparse attention forward over the physical sets of a whole layer, heads of all kinds at once."""

from patternsearch.kernels.attend.build import build_plan
from patternsearch.kernels.attend.launch import BACKENDS, attend, sparse_attention
from patternsearch.kernels.attend.plan import (
    AttendPlan,
    DiagonalSets,
    ImplicitSets,
    ListedSets,
    PlanCounts,
    make_plan,
)

__all__ = [
    "BACKENDS",
    "AttendPlan",
    "DiagonalSets",
    "ImplicitSets",
    "ListedSets",
    "PlanCounts",
    "attend",
    "build_plan",
    "make_plan",
    "sparse_attention",
]
