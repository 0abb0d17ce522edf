# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page: template, styles, scripts, the plotting library and the data.

Nothing is fetched when the page opens, and its content policy forbids that it could be. All text
from files reaches the page as JSON and is set as text, never as markup.
"""

import os
from pathlib import Path
from typing import Any

from patternsearch._version import __version__
from patternsearch.errors import InputError
from patternsearch.report.packing import json_for_script

__all__ = ["render_page", "write_page"]

# templates/plotly-cartesian.min.js is the npm package plotly.js-cartesian-dist-min 4.1.1 as
# published: a third of the script that the Python package carries, and opened so much faster.
_MARKER = "patternsearch/report"
_SCRIPTS = {
    "report": ("core.js", "tables.js", "map.js", "head.js", "whole.js", "report.js"),
    "compare": ("core.js", "tables.js", "map.js", "compare.js"),
}


def render_page(kind: str, title: str, document: dict[str, Any]) -> str:
    """Return the page as HTML.

    Args:
        kind: ``report`` or ``compare``: which scripts to include.
        title: of the document; escaped.
        document: plain JSON values for the scripts; no number may be NaN or infinite.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("patternsearch.report"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
    )
    loader = environment.loader
    assert loader is not None

    def raw(name: str) -> Markup:
        return Markup(loader.get_source(environment, name)[0])

    html: str = environment.get_template("page.html").render(
        marker=_MARKER,
        version=__version__,
        kind=kind,
        title=title,
        style=raw("page.css"),
        scripts=[raw(name) for name in _SCRIPTS[kind]],
        plotly=raw("plotly-cartesian.min.js"),
        data=Markup(json_for_script(document)),
    )
    return html


def write_page(html: str, path: Path) -> None:
    """Write a page; an earlier page may be replaced, no other file.

    Raises:
        InputError: the path is taken by something else or cannot be written.
    """
    if path.exists() and not _is_page(path):
        raise InputError(f"{path} exists and is no page of ours: choose another output")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(html, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"{path} cannot be written ({error.strerror}): choose another output"
        ) from None


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return _MARKER.encode() in stream.read(2048)
