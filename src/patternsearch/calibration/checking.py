# SPDX-License-Identifier: Apache-2.0
"""What can be said about a recipe without a tokenizer and without a network."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patternsearch.calibration.plan import ResolvedRecipe, plan_slots, resolve
from patternsearch.calibration.recipes import (
    FileSource,
    HubSource,
    PackageSource,
    Source,
    load_recipe,
    recipe_path,
)
from patternsearch.calibration.sources import package_files, resolve_paths

__all__ = ["CheckedRecipe", "SourceReport", "check_recipe"]


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One used source.

    Attributes:
        name: its name.
        kind: hub, files, package or synthetic.
        what: what it reads, for people.
        calibration: calibration samples over all lengths.
        heldout: held-out samples over all lengths.
    """

    name: str
    kind: str
    what: str
    calibration: int
    heldout: int


@dataclass(frozen=True, slots=True)
class CheckedRecipe:
    """A recipe that is correct, resolved on this machine."""

    resolved: ResolvedRecipe
    sources: tuple[SourceReport, ...]

    def document(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "recipe": self.resolved.model_dump(mode="json"),
            "sha256": self.resolved.sha256,
            "sources": [asdict(source) for source in self.sources],
        }


def check_recipe(
    path_or_name: str | Path,
    *,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    seed: int | None = None,
) -> CheckedRecipe:
    """Load and resolve a recipe and look whether its packages and files are there.

    Raises:
        RecipeError: the recipe, an argument or a file is wrong.
        EnvironmentLacks: a package that is not optional is missing.
    """
    resolved = resolve(load_recipe(path_or_name), lengths=lengths, samples=samples, seed=seed)
    base_dir = recipe_path(path_or_name).parent
    slots = plan_slots(resolved)
    reports = []
    for source in resolved.sources:
        splits = [slot.split for slot in slots if slot.source is source]
        reports.append(
            SourceReport(
                name=source.name,
                kind=source.kind,
                what=_what(source, base_dir),
                calibration=splits.count("calibration"),
                heldout=splits.count("heldout"),
            )
        )
    return CheckedRecipe(resolved, tuple(reports))


def _what(source: Source, base_dir: Path) -> str:
    if isinstance(source, HubSource):
        config = f" ({source.config})" if source.config else ""
        return f"{source.dataset}{config}, split {source.split}, field {source.field}"
    if isinstance(source, FileSource):
        return f"{_files(len(resolve_paths(source, base_dir)))}, {source.format}"
    if isinstance(source, PackageSource):
        return f"{_files(len(package_files(source)))} of {source.package}"
    return f"task {source.task}"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
