# SPDX-License-Identifier: Apache-2.0
"""A strict and bounded reader of YAML and JSON text into plain values.

Stricter than the formats: no anchors, aliases or tags, no duplicate keys, string keys only, one
document, no NaN or infinity, bounded depth. YAML plain scalars follow the JSON schema of YAML 1.2,
and the words and numbers on which YAML readers disagree (``yes``, ``0x10``, ``010``) are refused.
"""

import gc
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pydantic_core

from patternsearch.errors import ConfigError, InputError
from patternsearch.schema.files import MAX_DOCUMENT_BYTES, read_bounded
from patternsearch.schema.yaml_walker import MAX_DEPTH, PLACEHOLDER, Walker, shown

__all__ = [
    "Source",
    "collector_paused",
    "load_document",
    "parse_source",
    "read_source",
]

_LARGE_EXPONENTS = tuple(re.compile(e + r"\+?[0-9]{3,}(?=[\s,\]}]|$)") for e in "eE")
_MARK = "next item"
_SEPARATOR = f',"{_MARK}",'


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed document and where its parts stand in the text.

    Attributes:
        name: for messages, usually the path.
        value: plain dicts, lists, strings, numbers, booleans and None.
        json_text: the same value as JSON text, if it came for free.
    """

    name: str
    value: Any
    _text: str | None = field(default=None, repr=False)
    _lines: dict[int, Any] | None = field(default=None, repr=False)
    json_text: str | None = field(default=None, repr=False)

    def line_of(self, path: tuple[str | int, ...]) -> int | None:
        """Return the line (from 1) of the deepest part of ``path`` that can be located."""
        lines, value = self._lines, self.value
        if lines is None:
            if self._text is None or len(self._text) > 2**20:
                return None
            try:
                value, lines = Walker(self.name, self._text, set(), ConfigError).run()
            except InputError:
                return None
        line = None
        for part in path:
            known = lines.get(id(value))
            try:
                if known is not None:
                    line = known[part]
                value = value[part]
            except (KeyError, IndexError, TypeError):
                break
        return None if line is None else line + 1


def load_document(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_DOCUMENT_BYTES,
    error: type[InputError] = ConfigError,
) -> Any:
    """Read a YAML or JSON file into plain values (see :func:`read_source` for the rules)."""
    return read_source(path, max_bytes=max_bytes, error=error).value


def read_source(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_DOCUMENT_BYTES,
    error: type[InputError] = ConfigError,
) -> Source:
    """Read a YAML or JSON file; the suffix, else the first character, tells which.

    Raises:
        InputError: (as ``error``) anything this module's head refuses, with file and line.
    """
    content = read_bounded(path, max_bytes=max_bytes, error=error)
    return parse_source(content, str(path), error=error)


def parse_source(content: bytes, name: str, *, error: type[InputError] = ConfigError) -> Source:
    """Parse the bytes of a document; ``name`` stands for it in messages."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise error(
            f"{name}:{line}: byte {problem.start} is not UTF-8: "
            "a document is UTF-8 text; is this another kind of file?"
        ) from None
    suffix = Path(name).suffix.lower()
    is_json = suffix == ".json" or (
        suffix not in (".yaml", ".yml") and text.lstrip()[:1] in ("{", "[")
    )
    with collector_paused():
        if is_json:
            return Source(name, _parse_json(text, name, error), text, None, text)
        return _parse_yaml(text, name, error)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cycle collector: it would walk a growing document, which has no cycles, often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ------------------------------------------------------------------------------------- JSON


class _DuplicateKeyError(ValueError):
    """Carries the key that an object holds twice."""


class _NotFiniteError(ValueError):
    """Carries the text of a number that is no finite number."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(text)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise _NotFiniteError(text)


def _may_overflow(text: str) -> bool:
    """Whether a number may be too large for a float; a regular expression with a literal start."""
    return any(pattern.search(text) for pattern in _LARGE_EXPONENTS)


_plain_json = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_checked_json = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
)


def _parse_json(text: str, name: str, error: type[InputError]) -> Any:
    decoder = _checked_json if _may_overflow(text) else _plain_json
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as problem:
        end = " (the text ends here: is the file truncated?)" if problem.pos >= len(text) else ""
        raise error(
            f"{name}:{problem.lineno}: not valid JSON: {problem.msg} at column {problem.colno}{end}"
        ) from None
    except _DuplicateKeyError as problem:
        raise error(f"{name}: key {shown(str(problem))} stands twice in one object") from None
    except _NotFiniteError as problem:
        raise error(f"{name}: {shown(str(problem))} is not a finite number") from None
    except RecursionError:
        raise error(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise error(f"{name}: holds an integer of thousands of digits") from None
    if _bracket_depth(text) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise error(f"{name}: nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(value, name, error)
    return value


def _bracket_depth(text: str) -> int:
    """Return an upper bound of the depth: brackets inside strings are counted too."""
    depth = deepest = 0
    for match in re.finditer(r"[\[{\]}]", text):
        depth += 1 if match.group() in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list) and item] or []:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
        if depth > MAX_DEPTH:
            break
    return depth


def _refuse_lone_surrogates(value: Any, name: str, error: type[InputError]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise error(
            f"{name}: a string holds half of a surrogate pair, which is no character"
        ) from None


# ------------------------------------------------------------------------------------- YAML


def _parse_yaml(text: str, name: str, error: type[InputError]) -> Source:
    reduced, items = _take_json_items(text)
    if items:
        walker = Walker(name, reduced, set(items), error)
        value, lines = walker.run()
        if len(walker.placed) == len(items):
            json_text = _splice(value, walker.placed, items)
            return Source(name, value, text, lines, json_text)
        # Some of these lines were part of a longer scalar: read everything the slow way.
    value, lines = Walker(name, text, set(), error).run()
    return Source(name, value, text, lines, None)


def _take_json_items(text: str) -> tuple[str, dict[int, tuple[str, Any]]]:
    """Parse the ``- {...}`` and ``- [...]`` lines that are JSON.

    Canonical documents put every head on one such line; the JSON parser is far faster than YAML's.
    What does not parse (a comment, YAML's own flow style) stays for the YAML parser.

    Returns:
        The text with a placeholder for each such value, and by line (from 0) its JSON and value.
    """
    if "- {" not in text and "- [" not in text:
        return text, {}
    lines = text.split("\n")
    bodies: dict[int, str] = {}
    for number, line in enumerate(lines):
        body = line.lstrip(" ")[2:]
        if (
            line.endswith(("}", "]"))
            and line[: len(line) - len(body)].endswith("- ")
            and body.startswith(("{", "["))
            and body.count("[") + body.count("{") <= MAX_DEPTH // 2
            and "\\u" not in body
        ):
            bodies[number] = body
    items = _decode_items(bodies, may_overflow=_may_overflow(text))
    for number in items:
        lines[number] = lines[number][: -len(bodies[number])] + PLACEHOLDER
    return ("\n".join(lines) if items else text), items


def _decode_items(bodies: dict[int, str], *, may_overflow: bool) -> dict[int, tuple[str, Any]]:
    """Decode the bodies that are JSON by this module's rules; all in one call if all are."""
    values = [] if may_overflow else _decode_joined(bodies)
    if values:
        return dict(zip(bodies, zip(bodies.values(), values, strict=True), strict=True))
    decode = (_checked_json if may_overflow else _plain_json).decode
    items = {}
    for number, body in bodies.items():
        with suppress(ValueError, RecursionError):
            items[number] = (body, decode(body))
    return items


def _decode_joined(bodies: dict[int, str]) -> list[Any]:
    """Decode all bodies in one call of the fastest parser at hand; empty if one is no good."""
    # The separator is an item of its own, so that no body can end inside another.
    joined = f"[{_SEPARATOR.join(bodies.values())}]"
    try:
        values = pydantic_core.from_json(joined, allow_inf_nan=False)
    except ValueError:
        return []
    is_whole = len(values) == 2 * len(bodies) - 1 and all(v == _MARK for v in values[1::2])
    # The parser keeps the last of two equal keys: then a colon is missing when written again.
    is_unique = pydantic_core.to_json(values).count(b":") == joined.count(":")
    return values[::2] if is_whole and is_unique else []


def _splice(
    value: Any, placed: list[tuple[list[Any], int, int]], items: dict[int, tuple[str, Any]]
) -> str | None:
    """Put the items into the walked value; return the whole document as JSON, made of their text.

    None if a string of the document looks like one of the marks used for it.
    """
    for container, index, line in placed:
        container[index] = f"\0{line}\0"
    skeleton = json.dumps(value)
    num_found = 0

    def put(match: re.Match[str]) -> str:
        nonlocal num_found
        num_found += 1
        body, _ = items.get(int(match.group(1)), ("", None))
        return body

    text = re.sub(r'"\\u0000([0-9]{1,9})\\u0000"', put, skeleton)
    for container, index, line in placed:
        container[index] = items[line][1]
    return text if num_found == len(placed) else None
