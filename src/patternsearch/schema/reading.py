# SPDX-License-Identifier: Apache-2.0
"""A strict and bounded reader of YAML and JSON text into plain values.

Stricter than the formats: no anchors, aliases or tags, no duplicate keys, string keys only, one
document, no NaN or infinity, bounded depth. YAML plain scalars follow the JSON schema of YAML 1.2,
and the words and numbers on which YAML readers disagree (``yes``, ``0x10``, ``010``) are refused.
The YAML events are walked with an explicit stack, so no input can exhaust the interpreter's.
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

import yaml

from patternsearch.errors import ConfigError, InputError
from patternsearch.schema.files import MAX_DOCUMENT_BYTES, read_bounded

__all__ = [
    "MAX_DEPTH",
    "Source",
    "collector_paused",
    "load_document",
    "parse_source",
    "read_source",
]

MAX_DEPTH = 64
"""Containers inside one another; the deepest document of ours needs eight."""

_MAX_TOP_LEVEL_KEYS = 256
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,29})$")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)$", re.IGNORECASE)
_AMBIGUOUS = re.compile(
    r"(yes|no|on|off|true|false|null)$|[-+]?0[xob][0-9a-f_]+$|[-+]?[0-9][0-9_]*$", re.IGNORECASE
)
_CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}

_MAY_OVERFLOW = re.compile(r"[eE]\+?[0-9]{3,}(?=[\s,\]}]|$)")
_JSON_ITEM = re.compile(r"^( *- )([\[{].*[\]}])$", re.MULTILINE)
_PLACEHOLDER = "json-item"
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
    _text: str = field(repr=False)
    _lines: dict[int, Any] | None = field(repr=False)
    json_text: str | None = field(repr=False)

    def line_of(self, path: tuple[str | int, ...]) -> int | None:
        """Return the line (from 1) of the deepest part of ``path`` that can be located."""
        lines, value = self._lines, self.value
        if lines is None:
            if len(self._text) > 2**20:
                return None
            try:
                value, lines = _Walker(self.name, self._text, set(), ConfigError).run()
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


class _DuplicateKey(ValueError):
    """Carries the key that an object holds twice."""


class _NotFinite(ValueError):
    """Carries the text of a number that is no finite number."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFinite(text)
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise _NotFinite(text)


_plain_json = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_checked_json = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
)


def _parse_json(text: str, name: str, error: type[InputError]) -> Any:
    decoder = _checked_json if _MAY_OVERFLOW.search(text) else _plain_json
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as problem:
        end = " (the text ends here: is the file truncated?)" if problem.pos >= len(text) else ""
        raise error(
            f"{name}:{problem.lineno}: not valid JSON: {problem.msg} at column {problem.colno}{end}"
        ) from None
    except _DuplicateKey as problem:
        raise error(f"{name}: key {_shown(str(problem))} stands twice in one object") from None
    except _NotFinite as problem:
        raise error(f"{name}: {_shown(str(problem))} is not a finite number") from None
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
        walker = _Walker(name, reduced, set(items), error)
        value, lines = walker.run()
        if len(walker.placed) == len(items):
            json_text = _splice(value, walker.placed, items)
            return Source(name, value, text, lines, json_text)
        # Some of these lines were part of a longer scalar: read everything the slow way.
    value, lines = _Walker(name, text, set(), error).run()
    return Source(name, value, text, lines, None)


def _take_json_items(text: str) -> tuple[str, dict[int, tuple[str, Any]]]:
    """Parse the ``- {...}`` and ``- [...]`` lines that are JSON.

    Canonical documents put every head on one such line; the JSON parser is far faster than YAML's.
    What does not parse (a comment, YAML's own flow style) stays for the YAML parser.

    Returns:
        The text with a placeholder for each such value, and by line (from 0) its JSON and value.
    """
    bodies: dict[int, str] = {}
    line = position = 0
    for match in _JSON_ITEM.finditer(text):
        line += text.count("\n", position, match.start())
        position = match.start()
        body = match.group(2)
        if body.count("[") + body.count("{") <= MAX_DEPTH // 2 and "\\u" not in body:
            bodies[line] = body
    items = _decode_items(bodies, _checked_json if _MAY_OVERFLOW.search(text) else _plain_json)

    line = position = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal line, position
        line += text.count("\n", position, match.start())
        position = match.start()
        return match.group(1) + _PLACEHOLDER if line in items else match.group()

    return (_JSON_ITEM.sub(replace, text) if items else text), items


def _decode_items(bodies: dict[int, str], decoder: json.JSONDecoder) -> dict[int, tuple[str, Any]]:
    """Decode all bodies in one call if all are JSON, else those that are."""
    try:
        # The separator is an item of its own, so that no body can end inside another.
        values = decoder.decode(f"[{_SEPARATOR.join(bodies.values())}]")
    except (ValueError, RecursionError):
        values = []
    if len(values) == 2 * len(bodies) - 1 and all(v == _MARK for v in values[1::2]):
        return dict(zip(bodies, zip(bodies.values(), values[::2], strict=True), strict=True))
    items = {}
    for line, body in bodies.items():
        with suppress(ValueError, RecursionError):
            items[line] = (body, decoder.decode(body))
    return items


def _splice(
    value: Any, placed: list[tuple[list[Any], int, int]], items: dict[int, tuple[str, Any]]
) -> str | None:
    """Put the items into the walked value; return the whole document as JSON, made of their text.

    None if a string of the document looks like one of the marks used for it.
    """
    for container, index, line in placed:
        container[index] = f"\0{line}\0"
    skeleton = json.dumps(value)
    text, found = re.subn(
        r'"\\u0000([0-9]+)\\u0000"', lambda match: items[int(match.group(1))][0], skeleton
    )
    for container, index, line in placed:
        container[index] = items[line][1]
    return text if found == len(placed) else None


class _Walker:
    """Builds plain values from the YAML events of one document."""

    def __init__(self, name: str, text: str, items: set[int], error: type[InputError]) -> None:
        self._name = name
        self._text = text
        self._items = items
        self._error = error
        self._lines: dict[int, Any] = {}
        self._stack: list[Any] = []
        self._keys: list[str | None] = []
        self.placed: list[tuple[list[Any], int, int]] = []
        """Where the items went: list, index in it, line."""

    def run(self) -> tuple[Any, dict[int, Any]]:
        """Return the document's value, and by ``id`` of a container the lines of its children."""
        try:
            return self._walk(), self._lines
        except yaml.MarkedYAMLError as problem:
            mark = problem.problem_mark or problem.context_mark
            self._fail(mark.line if mark else 0, f"not valid YAML: {problem.problem}")
        except yaml.reader.ReaderError as problem:
            line = self._text.count("\n", 0, problem.position)
            self._fail(line, f"not valid YAML: {problem.reason}")
        except yaml.YAMLError as problem:
            raise self._error(f"{self._name}: not valid YAML: {problem}") from None

    def _fail(self, line: int, message: str) -> NoReturn:
        raise self._error(f"{self._name}:{line + 1}: {message}") from None

    def _walk(self) -> Any:
        result: Any = None
        num_documents = 0
        for event in yaml.parse(self._text, Loader=_Loader):
            kind = type(event)
            if kind is yaml.ScalarEvent:
                line = event.start_mark.line
                self._check_node(event, line)
                if self._stack and self._keys[-1] is None and isinstance(self._stack[-1], dict):
                    self._set_key(event, line)
                    continue
                value = self._scalar(event, line)
                if self._stack:
                    self._add(value, line)
                else:
                    result = value
            elif kind is yaml.MappingStartEvent or kind is yaml.SequenceStartEvent:
                line = event.start_mark.line
                self._check_node(event, line)
                container: Any = {} if kind is yaml.MappingStartEvent else []
                if self._stack:
                    self._add(container, line)
                else:
                    result = container
                if len(self._stack) >= MAX_DEPTH:
                    self._fail(line, f"nested deeper than {MAX_DEPTH} levels")
                self._lines[id(container)] = {} if isinstance(container, dict) else []
                self._stack.append(container)
                self._keys.append(None)
            elif kind is yaml.MappingEndEvent or kind is yaml.SequenceEndEvent:
                self._stack.pop()
                self._keys.pop()
            elif kind is yaml.AliasEvent:
                self._fail(event.start_mark.line, f"alias *{event.anchor}: write the value out")
            elif kind is yaml.DocumentStartEvent:
                num_documents += 1
                if num_documents > 1:
                    self._fail(event.start_mark.line, "a second document starts: one per file")
        return result

    def _check_node(self, event: Any, line: int) -> None:
        if event.anchor is not None:
            self._fail(line, f"anchor &{event.anchor}: anchors are not allowed, write values out")
        if event.tag is not None:
            self._fail(line, f"tag {event.tag}: tags are not allowed")

    def _set_key(self, event: Any, line: int) -> None:
        key = event.value
        if not event.style and not isinstance(self._plain(key, line), str):
            self._fail(line, f"key {_shown(key)} is not a string: quote it")
        mapping = self._stack[-1]
        if key in mapping:
            first = self._lines[id(mapping)][key] + 1
            self._fail(line, f"key {_shown(key)} stands twice, first in line {first}")
        if len(self._stack) == 1 and len(mapping) >= _MAX_TOP_LEVEL_KEYS:
            self._fail(line, f"more than {_MAX_TOP_LEVEL_KEYS} keys: not a document of ours")
        self._keys[-1] = key

    def _add(self, value: Any, line: int) -> None:
        container = self._stack[-1]
        if isinstance(container, dict):
            key = self._keys[-1]
            if key is None:
                self._fail(line, "a mapping or list as a key: keys are strings")
            container[key] = value
            self._lines[id(container)][key] = line
            self._keys[-1] = None
        else:
            container.append(value)
            self._lines[id(container)].append(line)

    def _scalar(self, event: Any, line: int) -> Any:
        value = event.value
        if event.style:  # plain is None, or "" from libyaml
            return value
        if value == _PLACEHOLDER and line in self._items and isinstance(self._stack[-1], list):
            self.placed.append((self._stack[-1], len(self._stack[-1]), line))
            return None
        return self._plain(value, line)

    def _plain(self, text: str, line: int) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.match(text):
            return int(text)
        if _FLOAT.match(text):
            number = float(text)
            if not math.isfinite(number):
                self._fail(line, f"{_shown(text)} is not a finite number")
            return number
        if _NOT_FINITE.match(text):
            self._fail(line, f"{text} is not a finite number (quote it if it is a word)")
        if _AMBIGUOUS.match(text):
            self._fail(
                line,
                f"{_shown(text)} means different things to different YAML readers: write true, "
                "false, null or a plain decimal number, or quote it",
            )
        return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
