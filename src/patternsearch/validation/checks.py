# SPDX-License-Identifier: Apache-2.0
"""The table of checks: what was expected, what was found, and what to do about it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from patternsearch.runtime.fit import Status
from patternsearch.runtime.mapping import MappingReport
from patternsearch.validation.quality_report import QualityReport
from patternsearch.validation.task_report import TaskReport

__all__ = ["INFORMATION", "LEVELS", "Check", "Level", "ValidationReport", "overall_status"]

Level = Literal["identity", "mapping", "quality", "task"]
Group = Literal["identity", "tensor parallel", "mapping", "quality", "task", "consumer"]

LEVELS: tuple[Level, ...] = ("identity", "mapping", "quality", "task")
"""From the cheapest to the dearest; each includes the ones before."""

INFORMATION = "for information"
"""What a check expects that only tells a number and judges nothing."""


class Check(BaseModel):
    """One question and its answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: Group
    name: str
    status: Status
    expected: str
    found: str
    advice: str = Field(default="", description="what to do; empty when all is well")


class ValidationReport(BaseModel):
    """The result of one validation, for people and programs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["patternsearch/validation"] = "patternsearch/validation"
    schema_version: Literal[1] = 1
    config: str
    config_sha256: str
    model: str
    level: Level
    status: Status
    checks: tuple[Check, ...]
    mapping: MappingReport | None = None
    quality: QualityReport | None = None
    task: TaskReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 1 if any check says no, else 0: what cannot be told is no fault."""
        return 1 if self.status == "differs" else 0

    def of_group(self, group: Group) -> tuple[Check, ...]:
        """Return the checks of one group."""
        return tuple(check for check in self.checks if check.group == group)


def overall_status(checks: tuple[Check, ...]) -> Status:
    """Return ``differs`` if any check differs; unknown only if nothing at all could be told."""
    statuses = tuple(check.status for check in checks)
    if "differs" in statuses:
        return "differs"
    return "ok" if "ok" in statuses else "cannot tell"
