# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the project's documents: configs, grids, and any other strict model.

The same config has the same digest whether it is kept as YAML or JSON; ``dump(load(x))`` gives
back the bytes of ``x`` for every document that was written by :func:`dump_config`.
"""

import os
import re
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel

from patternsearch._version import __version__
from patternsearch.data import data_path
from patternsearch.errors import ConfigError, InputError
from patternsearch.patterns.grids import Grid
from patternsearch.schema.canonical import canonical_json, canonical_sha256, canonical_yaml
from patternsearch.schema.config import CONFIG_FORMAT, PatternConfig
from patternsearch.schema.files import MAX_DOCUMENT_BYTES, write_atomic
from patternsearch.schema.migrations import migrate
from patternsearch.schema.reading import Source, collector_paused, load_document, read_source
from patternsearch.schema.validation import validate_document

__all__ = [
    "config_digest",
    "config_from_source",
    "config_from_value",
    "config_values",
    "document_digest",
    "dump_config",
    "dumps_config",
    "is_config_file",
    "load_config",
    "load_document",
    "load_grid",
    "load_model_file",
]

Model = TypeVar("Model", bound=BaseModel)

_MAX_SMALL_DOCUMENT_BYTES = 4 * 2**20
_CONFIG_MARK = re.compile(
    rb"""^\s*["']?format["']?\s*:\s*["']?patternsearch/config["']?\s*,?\s*$""", re.MULTILINE
)


def load_config(path: str | os.PathLike[str]) -> PatternConfig:
    """Load a config of any known schema version.

    Raises:
        ConfigError: unreadable, not a config, a newer version, or a fault in it, with its line.
    """
    with collector_paused():
        return config_from_source(read_source(path))


def config_from_source(source: Source) -> PatternConfig:
    """Build the config that a parsed document holds (see :func:`load_config`)."""
    document = source.value
    _check_format(document, source.name)
    return validate_document(source, PatternConfig, value=migrate(document, name=source.name))


def config_from_value(document: Any, name: str) -> PatternConfig:
    """Build the config that plain values hold, such as one embedded in another document."""
    _check_format(document, name)
    return validate_document(Source(name, migrate(document, name=name)), PatternConfig)


def _check_format(document: Any, name: str) -> None:
    if isinstance(document, list):
        raise ConfigError(
            f"{name} is a list, not a patternsearch config; "
            "if it is a MInference pattern file, use `patternsearch import`"
        )
    if not isinstance(document, dict):
        raise ConfigError(f"{name} is not a patternsearch config: it holds no mapping")
    found = document.get("format")
    if found is None:
        raise ConfigError(
            f"{name} is not a patternsearch config: it has no `format: {CONFIG_FORMAT}`"
        )
    if found != CONFIG_FORMAT:
        raise ConfigError(f"{name} has format {found!r}; a config has format {CONFIG_FORMAT!r}")


def dumps_config(config: PatternConfig, form: Literal["yaml", "json"] = "yaml") -> str:
    """Write a config as canonical text.

    Raises:
        InputError: a number in the model's RoPE parameters is not finite.
    """
    document = config_values(config)
    return canonical_json(document) if form == "json" else canonical_yaml(document)


def dump_config(
    config: PatternConfig, path: str | os.PathLike[str], *, force: bool = False
) -> None:
    """Write a config atomically; the suffix ``.json`` gives JSON, ``.yaml`` or ``.yml`` YAML.

    Args:
        config: the config.
        path: where to write.
        force: replace a file that is not a patternsearch config.

    Raises:
        InputError: another suffix, a foreign file without ``force``, or an unwritable folder.
        EnvironmentLacks: the disk is full or fails.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise InputError(f"{path}: a config's name ends in .yaml, .yml or .json")
    if path.exists() and not path.is_dir() and not force and not is_config_file(path):
        raise InputError(
            f"{path} exists and is not a patternsearch config: "
            "choose another name, or pass --force to replace it"
        )
    write_atomic(path, dumps_config(config, "json" if suffix == ".json" else "yaml").encode())


def is_config_file(path: str | os.PathLike[str]) -> bool:
    """Return whether the head of a file says that it is a patternsearch config."""
    try:
        with Path(path).open("rb") as file:
            return bool(_CONFIG_MARK.search(file.read(65536)))
    except OSError:
        return False


def config_values(config: PatternConfig) -> dict[str, Any]:
    """Return a config's plain values in canonical order: that of the models, else sorted."""
    document = config.model_dump()
    ropes = document["model"]["rope"]
    document["model"]["rope"] = {name: ropes[name] for name in sorted(ropes)}
    for rope in ropes.values():
        rope["parameters"] = _sorted_mapping(rope["parameters"])
    return document


def config_digest(config: PatternConfig) -> str:
    """Return the SHA-256 (hex) of what a config says, whatever file form it has.

    Left out: ``provenance`` (versions and device) and ``model.reference`` (a name, information
    only); they change nothing about which pattern a head runs and why.
    """
    document = config_values(config)
    del document["provenance"], document["model"]["reference"]
    return canonical_sha256(document)


def document_digest(model: BaseModel) -> str:
    """Return the SHA-256 (hex) of a document's content: comments and layout do not count."""
    return canonical_sha256(model.model_dump())


def load_model_file(
    path: str | os.PathLike[str],
    model: type[Model],
    *,
    error: type[InputError] = ConfigError,
    max_bytes: int = MAX_DOCUMENT_BYTES,
) -> Model:
    """Load a YAML or JSON file into a strict model, such as a grid or a recipe.

    A model with a ``format`` and a ``schema_version`` field of single literals gets clear
    messages when the file is another document or of a newer version.

    Raises:
        InputError: (as ``error``) naming file, line, key, value and rule.
    """
    source = read_source(path, max_bytes=max_bytes, error=error)
    if not isinstance(source.value, dict):
        raise error(f"{path} holds no mapping: this is no {model.__name__.lower()} document")
    wanted = {key: _only_literal(model, key) for key in ("format", "schema_version")}
    found = {key: source.value.get(key) for key in wanted}
    if None not in (wanted["format"], found["format"]) and found["format"] != wanted["format"]:
        raise error(f"{path} has format {found['format']!r}; expected {wanted['format']!r}")
    version, newest = found["schema_version"], wanted["schema_version"]
    if type(version) is int and type(newest) is int and version > newest:
        raise error(
            f"{path}: schema_version {version} is newer than {newest}, the newest that "
            f"patternsearch {__version__} reads: upgrade patternsearch"
        )
    return validate_document(source, model, error=error)


def _only_literal(model: type[BaseModel], key: str) -> Any:
    """Return the one value that a field of type ``Literal[value]`` can have, else None."""
    field = model.model_fields.get(key)
    values = get_args(field.annotation) if field else ()
    return values[0] if len(values) == 1 else None


def load_grid(path_or_name: str | os.PathLike[str]) -> tuple[Grid, str]:
    """Load a budget grid by path, or by the name of one shipped with the package.

    Returns:
        The grid and the SHA-256 (hex) of its content.

    Raises:
        ConfigError: no such grid, or a fault in it.
    """
    path = Path(path_or_name)
    if path.suffix.lower() not in (".yaml", ".yml", ".json") and not path.exists():
        folder = data_path("configs/grids")
        shipped = folder / f"{path_or_name}.yaml"
        if os.sep in str(path_or_name) or not shipped.is_file():
            names = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
            raise ConfigError(f"no grid {str(path_or_name)!r}: give a file, or one of {names}")
        path = shipped
    grid = load_model_file(path, Grid, max_bytes=_MAX_SMALL_DOCUMENT_BYTES)
    return grid, document_digest(grid)


def _sorted_mapping(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_mapping(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted_mapping(item) for item in value]
    return value
