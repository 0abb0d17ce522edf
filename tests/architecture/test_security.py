"""What the source must never do: run foreign bytes as code, or reach for the network unasked."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PICKLES = {"pickle", "cPickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"}
NETWORK = {"socket", "urllib", "http", "requests", "httpx", "aiohttp", "ftplib"}


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.fixture(scope="module")
def trees():
    """Every source by its path."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


def offenders(trees, is_bad):
    """Paths of which something is bad, with it."""
    return {path: bad for path, tree in trees.items() if (bad := sorted(is_bad(tree)))}


def test_no_pickle_is_imported(trees):
    assert not offenders(trees, lambda tree: PICKLES & set(imported(tree)))


def test_no_text_runs_as_code(trees):
    code = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    assert not offenders(trees, lambda tree: code & {name for name, _ in calls(tree)})


def test_torch_loads_tensors_only(trees):
    found = 0
    for path, tree in trees.items():
        for name, node in calls(tree):
            assert name not in {"np.load", "numpy.load", "pd.read_pickle"}, path
            if name == "torch.load":
                flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert flags.get("weights_only") == "True", path
                found += 1
    assert found  # the rule is about something


def test_yaml_is_read_by_a_safe_loader(trees):
    unsafe = {"yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"}
    assert not offenders(trees, lambda tree: unsafe & {name for name, _ in calls(tree)})


def test_network_is_left_to_the_hub_libraries(trees):
    assert not offenders(trees, lambda tree: (NETWORK - {"socket"}) & set(imported(tree)))
    sockets = offenders(
        trees, lambda tree: {name for name, _ in calls(tree) if name.startswith("socket.")}
    )
    assert set().union(*sockets.values()) <= {"socket.gethostname"}  # who holds a lock


def test_foreign_code_is_off_unless_asked_for(trees):
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            named = [*node.args.posonlyargs, *node.args.args]
            given = [None] * (len(named) - len(node.args.defaults)) + node.args.defaults
            pairs = [
                *zip(named, given, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if argument.arg in ("trust_remote_code", "allow_pickle") and default is not None:
                    assert ast.unparse(default) == "False", (path, node.name, argument.arg)


def test_every_source_names_its_licence():
    for path in SOURCES:
        first = path.read_text().splitlines()[:1]
        assert first in ([], ["# SPDX-License-Identifier: Apache-2.0"]), path
