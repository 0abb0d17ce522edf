"""Imports go one way, and starting the program loads neither torch nor datasets."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "patternsearch"

ALLOWED = {
    "patterns": set(),
    "kernels": {"patterns"},
    "schema": {"patterns"},
    "timing": {"kernels", "schema", "patterns"},
    "model": {"schema", "patterns"},
    "scoring": {"kernels", "schema", "patterns"},
    "selection": {"timing", "schema", "patterns"},
    "exchange": {"selection", "schema", "patterns"},
    "calibration": {"selection", "scoring", "model", "timing", "kernels", "schema", "patterns"},
    "runtime": {"model", "scoring", "timing", "kernels", "schema", "patterns"},
    "validation": {
        "runtime", "calibration", "exchange", "selection", "scoring", "model", "timing",
        "kernels", "schema", "patterns",
    },
    "report": {"exchange", "selection", "model", "timing", "kernels", "schema", "patterns"},
    "cli": {
        "report", "validation", "runtime", "calibration", "exchange", "selection", "scoring",
        "model", "timing", "kernels", "schema", "patterns",
    },
}  # fmt: skip
"""package: the packages of ours that it may import."""


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def _packages():
    return sorted(p.name for p in SRC.iterdir() if (p / "__init__.py").exists())


def test_every_package_has_a_place_in_the_order():
    assert set(_packages()) <= set(ALLOWED)


@pytest.mark.parametrize("package", _packages())
def test_package_imports_only_what_lies_below(package):
    for path in (SRC / package).rglob("*.py"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "patternsearch" and len(parts) > 1 and (SRC / parts[1]).is_dir():
                assert parts[1] == package or parts[1] in ALLOWED[package], (
                    f"{path.relative_to(SRC)} imports {name}"
                )


def _modules_after(statement):
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


def test_start_up_loads_no_heavy_library():
    loaded = _modules_after("import patternsearch.cli.app")
    assert not loaded & {"torch", "datasets", "transformers", "pandas", "triton", "scipy"}


def test_schema_needs_no_torch():
    code = "import patternsearch.schema.config, patternsearch.patterns.grids"
    assert "torch" not in _modules_after(code)


def test_only_the_command_line_uses_typer_and_rich():
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] != "cli":
            heads = {name.split(".")[0] for name in _imports(path)}
            assert not heads & {"typer", "rich"}, path


def test_every_kernel_has_reference_and_tests():
    for folder in (SRC / "kernels").iterdir():
        if folder.is_dir() and not folder.name.startswith("_"):
            assert (folder / "reference.py").exists(), folder
            assert list((ROOT / "tests" / "kernels").glob(f"test_{folder.name}*.py")), folder


def test_modules_have_no_catch_all_names_and_stay_short():
    for path in SRC.rglob("*.py"):
        assert path.stem not in {"utils", "helpers", "misc"}, path
        assert len(path.read_text().splitlines()) <= 420, path


def test_python_files_carry_the_licence_line():
    for path in SRC.rglob("*.py"):
        assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0"), path
