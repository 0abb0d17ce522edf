# SPDX-License-Identifier: Apache-2.0
"""The pages as one call each: a config with its scores, or two configs side by side."""

from pathlib import Path
from typing import Any

from patternsearch.report.compare import compare_document
from patternsearch.report.config_view import config_view, facts, headline, title_facts
from patternsearch.report.page import render_page
from patternsearch.report.scores import scores_view
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import load_config
from patternsearch.schema.scores import scores_folder_of
from patternsearch.timing.model import load_time_model

__all__ = ["compare_page", "report_document", "report_page"]


def report_page(
    config_path: Path,
    *,
    scores: Path | None = None,
    timings: Path | None = None,
    serve_dtype: str | None = None,
    thumbnails: dict[str, Any] | None = None,
) -> str:
    """Return the page of a config as HTML.

    Args:
        config_path: the config.
        scores: its scores folder; None takes the one beside the config, if there is one.
        timings: timing table for the times of candidates; None counts work.
        serve_dtype: torch dtype that serves, to look up times; None is the checkpoint's.
        thumbnails: drawings of single heads (see :mod:`patternsearch.report.thumbnails`).

    Raises:
        ConfigError, ScoresError, InputError, TimingError: a file is bad or does not fit.
    """
    config = load_config(config_path)
    document = report_document(
        config,
        config_path,
        scores=scores,
        timings=timings,
        serve_dtype=serve_dtype,
        thumbnails=thumbnails,
    )
    return render_page("report", config.model.reference, document)


def report_document(
    config: PatternConfig,
    config_path: Path,
    *,
    scores: Path | None = None,
    timings: Path | None = None,
    serve_dtype: str | None = None,
    thumbnails: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the page shows as plain JSON values; arguments as :func:`report_page`."""
    cost = None
    if timings is not None:
        cost = load_time_model(
            timings, dtype=serve_dtype or config.model.dtype, head_dim=config.model.head_dim
        )
    folder = scores
    if folder is None:
        beside = scores_folder_of(config_path).root
        folder = beside if beside.is_dir() and config.calibration is not None else None
    notes: list[str] = []
    view = None
    if folder is not None:
        view = scores_view(config, folder, cost)
        notes += view.notes
    elif config.calibration is not None:
        notes.append(
            "No scores folder was found beside the config: curves, samples and the frontier are "
            "left out. Give it with --scores."
        )
    if config.imported is not None:
        notes.append(
            "This config was imported: it holds no mass, density or time that patternsearch "
            "measured."
        )
    table = config.selection.timings_sha256 if config.selection else None
    if cost is not None and table is not None and cost.sha256 != table:
        notes.append(
            f"The times of candidates come from another table ({cost.device}) than the one that "
            "chose the patterns."
        )
    return {
        "title": config.model.reference,
        "subtitle": config_path.name,
        "title_facts": title_facts(config),
        "facts": facts(config),
        "headline": headline(config),
        "notes": notes,
        "config": config_view(config),
        "scores": None if view is None else view.document,
        "thumbnails": thumbnails,
    }


def compare_page(a: Path, b: Path) -> str:
    """Return the page that compares two configs or pattern files, as HTML.

    Raises:
        ConfigError: a file cannot be read.
    """
    document = compare_document(a, b)
    return render_page("compare", f"{a.name} against {b.name}", document)
