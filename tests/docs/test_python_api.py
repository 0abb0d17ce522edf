"""The Python API: light to import, typed, and its names are the ones that are written down."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import patternsearch

SOURCE = Path(patternsearch.__file__)

NAMES = {
    "CalibrationRequest", "PatternConfig", "PatternsearchError", "ScoresFolder",
    "SelectionOptions", "ValidationRequest", "__version__", "attach", "calibrate", "detach",
    "diff", "dump_config", "load_config", "load_time_model", "report_page", "select", "shadow",
    "validate",
}  # fmt: skip


def test_names_are_frozen():
    assert set(patternsearch.__all__) == NAMES
    assert set(dir(patternsearch)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_name_loads_and_is_documented(name):
    value = getattr(patternsearch, name)
    if name != "__version__":
        assert inspect.getdoc(value)
        parameters = () if inspect.isclass(value) else inspect.signature(value).parameters.values()
        assert all(p.annotation is not p.empty for p in parameters)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(SOURCE.read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        for alias in node.names
    }
    homes = {
        name: (f"patternsearch.{module}", attribute)
        for name, (module, attribute) in patternsearch._HOMES.items()
    }
    assert seen == homes
    assert set(homes) == NAMES - {"__version__"}


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        patternsearch.nothing  # noqa: B018


def test_import_is_light():
    code = "import patternsearch, sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & {"torch", "numpy", "pandas", "transformers", "pydantic", "typer"}
