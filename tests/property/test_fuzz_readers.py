"""Every file we read, damaged: a sentence for the user, never a traceback, and soon."""

import contextlib
import json
import signal
import time
import tracemalloc
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patternsearch.calibration.recipes import load_recipe
from patternsearch.errors import PatternsearchError
from patternsearch.exchange.pattern_file import read_pattern_file
from patternsearch.schema.io import dumps_config, load_config, load_grid
from patternsearch.selection.document import load_run_record
from patternsearch.selection.reading import load_scores
from patternsearch.timing.table import load_timings
from support.configs import make_config
from support.mutations import damaged_bytes, damaged_documents
from support.run_record import finished_scores
from support.timings_factory import timing_table

ROOT = Path(__file__).parents[2]
FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
LIMIT_S = 20
MAX_BYTES = 400 * 2**20

MINFERENCE = [
    {
        str(h): [kind, a, b, 0.9]
        for h, (kind, a, b) in enumerate(
            [("vertical_and_slash", 1000, 6096), ("stream_llm", 100, 800), ("block_sparse", 100, 0)]
        )
    }
] * 2


def grid(path):
    load_grid(path)[0].expand()


READERS = {
    "config.yaml": (load_config, lambda: dumps_config(make_config()).encode()),
    "config.json": (load_config, lambda: dumps_config(make_config(), "json").encode()),
    "recipe.yaml": (load_recipe, (ROOT / "calib" / "offline.yaml").read_bytes),
    "grid.yaml": (grid, (ROOT / "configs" / "grids" / "minference.yaml").read_bytes),
    "timings.json": (
        load_timings,
        lambda: json.dumps(timing_table().model_dump(mode="json")).encode(),
    ),
    "minference.json": (read_pattern_file, lambda: json.dumps(MINFERENCE).encode()),
}


@contextlib.contextmanager
def bounded():
    """Fail after a time and above an amount of memory."""

    def too_long(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(reader, path):
    """Read, or be told in one line what is wrong."""
    said = "nothing"
    with bounded():
        try:
            reader(path)
        except PatternsearchError as error:
            said = str(error)
    assert said.strip()
    assert len(said) < 20_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", READERS)
def test_undamaged_file_is_read(name, folder):
    reader, content = READERS[name]
    path = folder / name
    path.write_bytes(content())
    reader(path)


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read(name, folder, data):
    reader, content = READERS[name]
    path = folder / name
    path.write_bytes(data.draw(damaged_bytes(content())))
    read(reader, path)


@pytest.mark.parametrize("name", READERS)
@FUZZ
@given(data=st.data())
def test_damaged_trees_are_refused_or_read(name, folder, data):
    reader, content = READERS[name]
    path = folder / name
    is_json = path.suffix == ".json"
    whole = json.loads(content()) if is_json else yaml.safe_load(content())
    document = data.draw(damaged_documents(whole))
    text = json.dumps(document) if is_json else yaml.safe_dump(document)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    read(reader, path)


LAUGHS = "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMBS = {
    "laughs.yaml": f"a: &a [x,x,x,x,x,x,x,x,x]\n{LAUGHS}",
    "deep.yaml": "[" * 20_000,
    "deep.json": "[" * 20_000,
    "number.json": '{"a": ' + "9" * 200_000 + "}",
    "keys.yaml": "".join(f"k{i}: 1\n" for i in range(20_000)),
    "tag.yaml": "!!python/object/apply:os.system ['true']\n",
    "nul.yaml": "\x00" * 10_000,
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("reader", [load_config, load_recipe, grid, load_timings])
def test_bombs_are_refused_soon(name, reader, folder):
    path = folder / name
    path.write_text(BOMBS[name])
    start = time.monotonic()
    with bounded(), pytest.raises(PatternsearchError):
        reader(path)
    assert time.monotonic() - start < LIMIT_S


def test_grid_that_expands_without_end_is_refused(folder):
    axis = list(range(1, 2000))
    document = {
        "format": "patternsearch/grid", "schema_version": 1, "name": "big", "min_tokens": 64,
        "candidates": [{"kind": "vertical_slash", "estimator": "spread", "vertical": axis,
                        "diagonals": axis, "tile": [64], "last_q": axis, "spread_rows": axis}],
    }  # fmt: skip
    path = folder / "big.yaml"
    path.write_text(json.dumps(document))
    with bounded(), pytest.raises(PatternsearchError, match="at most 4096"):
        load_grid(path)


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    return finished_scores(tmp_path_factory.mktemp("scores") / "c.scores")


@FUZZ
@given(data=st.data())
def test_damaged_scores_are_refused_or_read(scores, data):
    files = [path for path in sorted(scores.root.rglob("*")) if path.is_file()]
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged_bytes(content)))
        read(load_scores, scores)
        read(load_run_record, scores)
    finally:
        path.write_bytes(content)


@FUZZ
@given(data=st.data())
def test_damaged_run_records_are_refused_or_read(scores, data):
    content = scores.run.read_bytes()
    try:
        document = data.draw(damaged_documents(json.loads(content)))
        scores.run.write_text(json.dumps(document), errors="surrogatepass")
        read(load_run_record, scores)
    finally:
        scores.run.write_bytes(content)
