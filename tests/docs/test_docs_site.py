"""The documentation builds without a network, and its links and reference pages hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.skipif(not (BIN / "mkdocs").exists(), reason="mkdocs is not installed")
def test_site_builds_and_asks_for_nothing(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9",
                   "https_proxy": "http://127.0.0.1:9"}  # fmt: skip
    run = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="(http[^"]+)|<link[^>]+rel="(?:stylesheet|preload|icon)"'
            r'[^>]+href="(http[^"]+)',
            page.read_text(),
        )
        assert not loaded, f"{page.name} loads {loaded}"


def test_readme_links_resolve():
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_reference_is_what_the_code_says():
    run = subprocess.run(
        [sys.executable, "scripts/generate_reference.py", "--check"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def test_drawings_are_what_the_geometry_says(tmp_path, monkeypatch):
    import runpy

    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_concepts.py"))
    drawn["main"].__globals__["TARGET"] = tmp_path
    drawn["main"]()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / "assets" / path.name).read_text(), path.name
