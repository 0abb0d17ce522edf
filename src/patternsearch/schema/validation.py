# SPDX-License-Identifier: Apache-2.0
"""Plain values into a model, with each fault told by file, line, path, value and rule."""

import difflib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from patternsearch.errors import ConfigError, InputError
from patternsearch.schema.reading import Source

__all__ = ["validate_document"]

Model = TypeVar("Model", bound=BaseModel)

_MAX_FAULTS = 5


def validate_document(
    source: Source,
    model: type[Model],
    *,
    value: Any = None,
    error: type[InputError] = ConfigError,
) -> Model:
    """Validate a parsed document strictly: an integer may stand for a float, nothing else bends.

    Args:
        source: the parsed document.
        model: the class to build.
        value: what to validate instead of ``source.value`` (a migrated document).
        error: the class of the error to raise.

    Raises:
        InputError: (as ``error``) with up to five faults.
    """
    text = source.json_text
    if value is None or value is source.value:
        value = source.value
    else:
        text = None
    try:
        # JSON mode is pydantic's strict mode for documents: lists for tuples, no other coercion.
        return model.model_validate_json(text or json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as problem:
        faults = problem.errors(include_url=False)
        shown = [_fault(source, value, model, dict(f)) for f in faults[:_MAX_FAULTS]]
        if len(faults) > _MAX_FAULTS:
            shown.append(f"... and {len(faults) - _MAX_FAULTS} more faults")
        raise error("\n".join(shown)) from None


def _fault(source: Source, value: Any, model: type[BaseModel], fault: dict[str, Any]) -> str:
    path = _document_path(value, fault["loc"])
    line = source.line_of(path)
    where = source.name if line is None else f"{source.name}:{line}"
    spelled = _spell(path)
    prefix = f"{where}: {spelled}: " if spelled else f"{where}: "
    kind = fault["type"]
    if kind == "missing":
        parent = _spell(path[:-1])
        return f"{where}: {f'{parent}: ' if parent else ''}key {path[-1]!r} is missing"
    if kind == "extra_forbidden":
        return prefix + "unknown key" + _suggestion(str(path[-1]), model)
    message = str(fault["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    seen = fault["input"]
    if kind == "value_error" or isinstance(seen, dict | list):
        return prefix + message
    text = json.dumps(seen, ensure_ascii=False)
    return f"{prefix}got {text if len(text) <= 80 else text[:77] + '...'}: {message}"


def _document_path(value: Any, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Drop the tags of unions from pydantic's location; what is left leads through the document."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            path.append(part)
            value = value[part]
        elif position == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _spell(path: tuple[str | int, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _suggestion(key: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    names: set[str] = set()
    for part in (schema, *schema.get("$defs", {}).values()):
        names.update(part.get("properties", ()))
    close = difflib.get_close_matches(key, sorted(names - {key}), n=1)
    return f": did you mean {close[0]!r}?" if close else "; remove it"
