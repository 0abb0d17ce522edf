# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: hub datasets, local files and installed packages.

``datasets`` is imported only when a source is streamed. Only a hub source touches the network.
"""

import ast
import glob
import math
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from patternsearch.calibration.packing import Document
from patternsearch.calibration.randomness import key_digest
from patternsearch.calibration.recipes import (
    STDLIB,
    FileSource,
    HubSource,
    PackageSource,
)
from patternsearch.calibration.tokens import Encoder, Message
from patternsearch.errors import EnvironmentLacks, RecipeError
from patternsearch.schema.files import read_bounded

__all__ = ["DocumentSource", "is_heldout", "open_rows", "package_files", "resolve_paths"]

DocumentSource = HubSource | FileSource | PackageSource

_MAX_FILE_BYTES = 64 << 20
_MAX_PACKAGE_BYTES = 256 << 20
_BUILDER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"sample_by": "document"},
    "json": {},
    "parquet": {},
}


def is_heldout(position: int, fraction: float) -> bool:
    """Tell whether the document at this position of a source's order is held out.

    Of every 1/fraction documents the first one is, so any source of two documents has both
    kinds (for fractions up to a half).
    """
    exact = Fraction(fraction).limit_denominator(10_000)
    return math.ceil((position + 1) * exact) > math.ceil(position * exact)


def iter_documents(
    source: DocumentSource, *, seed: int, base_dir: Path, encoder: Encoder
) -> Iterator[Document]:
    """Yield the documents of a source in its own order, empty and too short ones left out.

    Files of a package come in an order shuffled by the seed; datasets and local files come as
    they are stored, shuffled by the seed within blocks if the source says so.

    Raises:
        RecipeError: a file or row is missing or not what the recipe says.
        EnvironmentLacks: the hub cannot be reached.
    """
    documents = (
        _package_documents(source, seed)
        if isinstance(source, PackageSource)
        else _shuffled(source, seed, _row_documents(source, base_dir, encoder))
    )
    for document in documents:
        if not document.text.strip() or len(document.text) < source.min_chars:
            continue
        if document.is_conversation and encoder.chat_template:
            yield document
        else:
            # A blank line parts it from the next one, as in a prompt of several documents.
            text = document.text.strip("\n") + "\n\n"
            yield Document(document.id, text, document.is_conversation)


# --- packages --------------------------------------------------------------------------------


def package_files(source: PackageSource) -> list[tuple[str, Path]]:
    """Return the files that a package source names: path within the package, and full path.

    Raises:
        RecipeError: a pattern matches nothing.
        EnvironmentLacks: the package is not installed or has no folder.
    """
    roots = _package_roots(source)
    found: dict[str, Path] = {}
    for pattern in source.files:
        matches = [
            (Path(path).relative_to(root).as_posix(), Path(path))
            for root in roots
            for path in glob.glob(str(root / pattern), recursive=True)
            if Path(path).is_file() and Path(path).resolve().is_relative_to(root)
        ]
        if not matches:
            raise RecipeError(
                f"source {source.name}: no file of package {source.package} matches "
                f"{pattern!r}: correct the pattern"
            )
        found.update(matches)
    size_bytes = sum(path.stat().st_size for path in found.values())
    if size_bytes > _MAX_PACKAGE_BYTES:
        raise RecipeError(
            f"source {source.name}: its patterns match {size_bytes >> 20} MiB of package "
            f"{source.package}, the limit is {_MAX_PACKAGE_BYTES >> 20}: name fewer files"
        )
    return sorted(found.items())


def _package_roots(source: PackageSource) -> list[Path]:
    if source.package == STDLIB:
        return [Path(sysconfig.get_path("stdlib")).resolve()]
    try:
        spec = find_spec(source.package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise EnvironmentLacks(
            f"source {source.name}: package {source.package} is not installed: install it"
        )
    if not spec.submodule_search_locations:
        raise RecipeError(
            f"source {source.name}: {source.package} is a single module, not a package with files"
        )
    return [Path(location).resolve() for location in spec.submodule_search_locations]


def _package_documents(source: PackageSource, seed: int) -> Iterator[Document]:
    documents: list[Document] = []
    for relative, path in package_files(source):
        text = _read_text(source.name, path)
        if source.read == "text":
            documents.append(Document(relative, text))
        else:
            documents += _strings_of(source.name, relative, text)
    documents.sort(key=lambda document: key_digest(seed, source.name, document.id))
    yield from documents


def _read_text(source: str, path: Path) -> str:
    content = read_bounded(path, max_bytes=_MAX_FILE_BYTES, error=RecipeError)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"source {source}: {path} is not UTF-8 text (byte {error.start}): leave it out"
        ) from None
    return text.replace("\r\n", "\n")


def _strings_of(source: str, relative: str, text: str) -> list[Document]:
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RecipeError(
            f"source {source}: {relative} is not Python that can be parsed: use read: text"
        ) from None
    dictionaries = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
    ]
    documents = [
        Document(f"{relative}:{key.value}", value.value)
        for dictionary in dictionaries
        for key, value in zip(dictionary.keys, dictionary.values, strict=True)
        if isinstance(key, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    ]
    if not documents:
        raise RecipeError(
            f"source {source}: {relative} assigns no dictionary of strings at its top level: "
            "use read: text"
        )
    return documents


# --- datasets --------------------------------------------------------------------------------


def resolve_paths(source: FileSource, base_dir: Path) -> list[Path]:
    """Return the files that a file source names, in order, without repetition.

    Raises:
        RecipeError: a path matches no file, or a relative one leads out of ``base_dir``.
    """
    found: dict[Path, None] = {}
    for pattern in source.paths:
        is_absolute = Path(pattern).is_absolute()
        root = glob.escape(str(base_dir.resolve()))
        matches = sorted(glob.glob(pattern if is_absolute else f"{root}/{pattern}", recursive=True))
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            where = "" if is_absolute else f" in {base_dir}"
            raise RecipeError(
                f"source {source.name}: no file matches {pattern!r}{where}: correct the path"
            )
        for file in files:
            if not is_absolute and not file.resolve().is_relative_to(base_dir.resolve()):
                raise RecipeError(
                    f"source {source.name}: {file} is a link out of the recipe's folder: give "
                    "its absolute path if that is meant"
                )
            found[file] = None
    return list(found)


def open_rows(source: HubSource | FileSource, base_dir: Path) -> Any:
    """Open a hub or file source as a streaming ``datasets.IterableDataset``.

    Raises:
        RecipeError: the dataset, config, split or a file does not exist.
        EnvironmentLacks: the hub cannot be reached, or ``datasets`` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise EnvironmentLacks(
            f"source {source.name} needs the package datasets: pip install datasets"
        ) from None
    if isinstance(source, HubSource) and Path(source.dataset).exists():
        raise RecipeError(
            f"source {source.name}: the current folder holds {source.dataset}, which would be "
            "read instead of the hub dataset: run from another folder, or use kind: files"
        )
    with _datasets_errors(source):
        if isinstance(source, HubSource):
            return datasets.load_dataset(
                source.dataset,
                name=source.config,
                split=source.split,
                revision=source.revision,
                streaming=True,
            )
        files = [str(path) for path in resolve_paths(source, base_dir)]
        with _no_download_counts(datasets.config):
            return datasets.load_dataset(
                source.format,
                data_files=[glob.escape(file) for file in files],
                split="train",
                streaming=True,
                **_BUILDER_OPTIONS[source.format],
            )


@contextmanager
def _no_download_counts(config: Any) -> Iterator[None]:
    """Keep ``load_dataset`` from telling the hub that a local file was opened."""
    before = config.HF_UPDATE_DOWNLOAD_COUNTS
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = before


@contextmanager
def _datasets_errors(source: HubSource | FileSource) -> Iterator[None]:
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from pyarrow import ArrowException

    try:
        yield
    except (RecipeError, EnvironmentLacks):
        raise
    except (DatasetsError, OSError, ValueError, TypeError, KeyError, ArrowException) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if isinstance(source, FileSource):
            raise RecipeError(
                f"source {source.name}: the files cannot be read as {source.format}: {reason}; "
                "correct the format or the files"
            ) from None
        if isinstance(error, OSError) and not isinstance(error, DatasetNotFoundError):
            raise EnvironmentLacks(
                f"source {source.name}: the hub dataset {source.dataset} cannot be reached: "
                f"{reason}; connect to the network, or take a recipe without hub datasets "
                "(such as offline)"
            ) from None
        raise RecipeError(
            f"source {source.name}: the hub dataset {source.dataset} cannot be used: {reason}"
        ) from None


def _shuffled(
    source: HubSource | FileSource, seed: int, documents: Iterator[Document]
) -> Iterator[Document]:
    while block := list(islice(documents, source.shuffle_block)):
        if source.shuffle_block > 1:
            block.sort(key=lambda document: key_digest(seed, source.name, document.id))
        yield from block


def _row_documents(
    source: HubSource | FileSource, base_dir: Path, encoder: Encoder
) -> Iterator[Document]:
    names: list[str] = []
    if isinstance(source, FileSource) and source.format == "text":
        names = [os.path.relpath(path, base_dir) for path in resolve_paths(source, base_dir)]
    field = "text" if names else source.field
    rows = iter(open_rows(source, base_dir))
    position = 0
    while True:
        with _datasets_errors(source):
            row = next(rows, None)
        if row is None:
            return
        name = names[position] if names else f"row-{position}"
        yield _row_document(source, name, row, field, encoder)
        position += 1


def _row_document(
    source: HubSource | FileSource, name: str, row: dict[str, Any], field: str, encoder: Encoder
) -> Document:
    if field not in row:
        fields = ", ".join(sorted(row)) or "none"
        raise RecipeError(
            f"source {source.name}: {name} has no field {field!r} (its fields: {fields}): set field"
        )
    value = row[field]
    if value is None:
        return Document(name, "")
    if isinstance(value, str):
        return Document(name, value)
    messages = _messages(value)
    if messages is None:
        raise RecipeError(
            f"source {source.name}: field {field!r} of {name} is neither text nor a list of "
            "messages with role and content: choose another field"
        )
    return Document(name, encoder.render(messages, is_prompt=False), is_conversation=True)


def _messages(value: Any) -> list[Message] | None:
    if not isinstance(value, list) or not value:
        return None
    if not all(
        isinstance(item, dict)
        and isinstance(item.get("role"), str)
        and isinstance(item.get("content"), str)
        for item in value
    ):
        return None
    return [{"role": item["role"], "content": item["content"]} for item in value]
