"""Sources: local files through streaming datasets, packages, the hub seam, and their faults."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patternsearch.calibration import sources as module
from patternsearch.calibration.plan import resolve
from patternsearch.calibration.samples import draw_samples
from patternsearch.calibration.sources import is_heldout, iter_documents, open_rows, package_files
from patternsearch.calibration.tokens import Encoder
from patternsearch.errors import EnvironmentLacks, RecipeError
from support.recipes import paragraphs, recipe, stdlib, text_files, tiny_tokenizer

CHAT = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "There."}]


def documents(source, base_dir, *, chat_template=False, seed=0):
    [found] = resolve(recipe(source)).sources
    encoder = Encoder(tiny_tokenizer(), chat_template=chat_template)
    return list(iter_documents(found, seed=seed, base_dir=base_dir, encoder=encoder))


def source(kind_format, paths, **fields):
    return text_files(name="local", paths=paths, **fields) | {"format": kind_format}


def write_rows(folder, kind_format, rows):
    if kind_format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
        return "rows.parquet"
    if kind_format == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return "rows.jsonl"
    (folder / "rows.json").write_text(json.dumps(rows))
    return "rows.json"


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_rows_become_documents(tmp_path, kind):
    rows = [{"body": paragraphs(i), "n": i} for i in range(3)]
    path = write_rows(tmp_path, kind, rows)
    found = documents(source(kind.removesuffix("l"), [path], field="body"), tmp_path)
    assert [d.id for d in found] == ["row-0", "row-1", "row-2"]
    assert [d.text for d in found] == [row["body"] + "\n\n" for row in rows]


def test_text_files_are_one_document_each_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(f"first\n\nsecond {name}\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    found = documents(text_files(paths=["**/*.txt"]), tmp_path)
    assert [d.id for d in found] == ["a.txt", "b.txt", "sub/c.txt"]
    assert found[0].text == "first\n\nsecond a.txt\n\n"


def test_files_are_streamed(tmp_path):
    import datasets

    path = write_rows(tmp_path, "jsonl", [{"text": "x"}])
    [found] = resolve(recipe(source("json", [path]))).sources
    assert isinstance(open_rows(found, tmp_path), datasets.IterableDataset)


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize("chat_template", [False, True])
def test_message_lists_are_rendered(tmp_path, kind, chat_template):
    path = write_rows(tmp_path, kind, [{"messages": CHAT}])
    rendered = documents(
        source(kind, [path], field="messages"), tmp_path, chat_template=chat_template
    )
    [found] = rendered
    assert found.is_conversation
    if chat_template:
        assert found.text == tiny_tokenizer().apply_chat_template(CHAT, tokenize=False)
        assert found.text.startswith("<|im_start|>user\nWhere")
    else:
        assert found.text == "User: Where is it?\n\nAssistant: There.\n\n"


def test_shuffle_block_shuffles_within_blocks_by_the_seed(tmp_path):
    path = write_rows(tmp_path, "jsonl", [{"text": f"text {i}"} for i in range(20)])
    orders = [
        [
            int(d.id[4:])
            for d in documents(source("json", [path], shuffle_block=8), tmp_path, seed=s)
        ]
        for s in (0, 1)
    ]
    assert orders[0] != orders[1]
    for order in orders:
        assert order != sorted(order)
        assert [sorted(order[i : i + 8]) for i in (0, 8, 16)] == [
            list(range(8)), list(range(8, 16)), list(range(16, 20)),
        ]  # fmt: skip


def test_min_chars_passes_short_documents_over(tmp_path):
    path = write_rows(tmp_path, "jsonl", [{"text": "x" * n} for n in (5, 50, 500)])
    found = documents(source("json", [path], min_chars=50), tmp_path)
    assert [d.id for d in found] == ["row-1", "row-2"]


@pytest.mark.parametrize(
    ("rows", "field", "said"),
    [
        ([{"a": "x", "b": "y"}], "text", ["row-0", "no field 'text'", "a, b"]),
        ([{"text": 3}], "text", ["row-0", "'text'", "neither text nor a list of messages"]),
        ([{"text": [{"role": "user"}]}], "text", ["neither text nor"]),
        ([{"text": ["x"]}], "text", ["neither text nor"]),
    ],
)
def test_row_faults_are_named(tmp_path, rows, field, said):
    path = write_rows(tmp_path, "jsonl", rows)
    with pytest.raises(RecipeError) as caught:
        documents(source("json", [path], field=field), tmp_path)
    assert all(text in str(caught.value) for text in ["source local", *said])


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("json", "x.json", b"{not json"),
        ("json", "x.jsonl", b'{"text": "a"}\n{"text": \n'),
        ("parquet", "x.parquet", b"PAR1 is not enough"),
        ("parquet", "y.parquet", b""),
        ("text", "x.txt", b"\xff\xfe\xfa"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path, kind, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=f"source local: .*cannot be read as {kind}") as caught:
        documents(source(kind, [name]), tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"source notes: no file matches 'gone\.txt'"):
        documents(text_files(paths=["gone.txt"]), tmp_path)


def test_relative_paths_stay_in_the_recipes_folder(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "link.txt").symlink_to(outside)
    with pytest.raises(RecipeError, match="link out of the recipe's folder"):
        documents(text_files(paths=["link.txt"]), folder)
    assert [d.text for d in documents(text_files(paths=[str(outside)]), folder)] == ["secret\n\n"]


def test_names_with_pattern_characters_are_read(tmp_path):
    folder = tmp_path / "a[1]"
    folder.mkdir()
    (folder / "x[2].txt").write_text("here")
    assert [d.text for d in documents(text_files(paths=["*.txt"]), folder)] == ["here\n\n"]


# --- packages --------------------------------------------------------------------------------


def make_package(monkeypatch, tmp_path, name="texts_of_a_test"):
    folder = tmp_path / name
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('a recipe never imports a package')")
    for i in range(5):
        (folder / "data" / f"{i}.txt").write_text(paragraphs(i))
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"kind": "package", "name": "package", "package": name, "files": ["data/*.txt"]}


def test_package_files_are_found_without_importing(monkeypatch, tmp_path):
    package = make_package(monkeypatch, tmp_path)
    found = documents(package, tmp_path)
    assert {d.id for d in found} == {f"data/{i}.txt" for i in range(5)}
    assert [d.id for d in found] == [d.id for d in documents(package, tmp_path)]
    assert [d.id for d in found] != [d.id for d in documents(package, tmp_path, seed=1)]


def test_package_links_out_are_not_followed(monkeypatch, tmp_path):
    package = make_package(monkeypatch, tmp_path)
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / package["package"] / "data" / "9.txt").symlink_to(tmp_path / "outside.txt")
    assert "data/9.txt" not in {d.id for d in documents(package, tmp_path)}


def test_stdlib_code_and_reference_texts(tmp_path):
    code = documents(stdlib(), tmp_path)
    assert {d.id for d in code} == {"typing.py", "ast.py", "pickle.py", "inspect.py"}
    topics = documents(
        stdlib(name="topics", files=["pydoc_data/topics.py"], read="python_strings"), tmp_path
    )
    assert len(topics) > 50
    by_id = {d.id: d.text for d in topics}
    assert by_id["pydoc_data/topics.py:assert"].startswith('The "assert" statement')


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": ["no_such_*.py"]}, "no file of package stdlib matches 'no_such_\\*.py'"),
        ({"files": ["ast.py"], "read": "python_strings"}, "no dictionary of strings"),
        (
            {"files": ["pydoc_data/*"], "read": "python_strings"},
            "__init__.py assigns no dictionary",
        ),
    ],
)
def test_package_faults_are_named(tmp_path, changes, said):
    with pytest.raises(RecipeError, match=said):
        documents(stdlib(**changes), tmp_path)


def test_package_files_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PACKAGE_BYTES", 1 << 20)
    [found] = resolve(recipe(stdlib(files=["*.py"]))).sources
    with pytest.raises(RecipeError, match="MiB of package stdlib, the limit is 1"):
        package_files(found)


def test_package_files_refuses_a_single_module(monkeypatch, tmp_path):
    (tmp_path / "lonely_module.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = resolve(recipe(stdlib(package="lonely_module"))).sources
    with pytest.raises(RecipeError, match="single module"):
        package_files(found)


# --- the hub ---------------------------------------------------------------------------------

HUB = {"kind": "hub", "name": "books", "dataset": "owner/books", "field": "content"}


def test_hub_offline_is_an_environment_fault_in_one_sentence():
    code = """
from pathlib import Path
from support.recipes import recipe, tiny_tokenizer
from patternsearch.calibration.samples import draw_samples
try:
    draw_samples(recipe({"kind": "hub", "name": "books", "dataset": "owner/books"}),
                 tiny_tokenizer(), base_dir=Path("."))
except Exception as error:
    print(type(error).__name__, error.exit_code, error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": "tests", "PATH": "", "HOME": "/nonexistent"},
    )
    assert run.stdout.startswith(
        "EnvironmentLacks 3 source books: the hub dataset owner/books cannot be reached"
    )
    assert len(run.stdout.splitlines()) == 1


def test_hub_rows_are_streamed_with_the_sources_arguments(monkeypatch, tmp_path):
    import datasets

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return datasets.IterableDataset.from_generator(
            lambda: ({"content": paragraphs(i)} for i in range(40))
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = HUB | {"config": "en", "split": "test", "revision": "abc"}
    samples = draw_samples(recipe(hub), tiny_tokenizer(), base_dir=tmp_path)
    assert asked == [
        (("owner/books",), {"name": "en", "split": "test", "revision": "abc", "streaming": True})
    ]
    assert [s.documents[0].document for s in samples if s.split == "heldout"] == ["row-0"] * 2


def test_hub_never_means_a_local_folder(monkeypatch, tmp_path):
    (tmp_path / "owner" / "books").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="the current folder holds owner/books"):
        draw_samples(recipe(HUB), tiny_tokenizer(), base_dir=tmp_path)


def test_unknown_hub_dataset_is_a_recipe_fault(monkeypatch, tmp_path):
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    def load_dataset(*arguments, **options):
        raise DatasetNotFoundError("Dataset 'owner/books' doesn't exist on the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(RecipeError, match=r"source books: .*doesn't exist on the Hub$"):
        draw_samples(recipe(HUB), tiny_tokenizer(), base_dir=tmp_path)


def test_local_files_open_no_connection(monkeypatch, tmp_path):
    """``datasets`` counts uses of its builders at the hub unless it is told not to."""
    import socket

    def refuse(*arguments):
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    (tmp_path / "a.txt").write_text("text")
    assert len(documents(text_files(), tmp_path)) == 1


def test_missing_datasets_library_is_an_environment_fault(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(EnvironmentLacks, match="needs the package datasets"):
        documents(text_files(), tmp_path)


@pytest.mark.parametrize("fraction", [0.5, 0.3333, 0.25, 0.1, 0.01])
def test_is_heldout_takes_the_fraction_and_one_of_two(fraction):
    held = [is_heldout(position, fraction) for position in range(2000)]
    assert held[:2] == [True, False]
    assert sum(held) == pytest.approx(2000 * fraction, abs=1)


def test_is_heldout_of_nothing():
    assert not any(is_heldout(position, 0.0) for position in range(100))
