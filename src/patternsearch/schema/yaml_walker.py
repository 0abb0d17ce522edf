# SPDX-License-Identifier: Apache-2.0
"""YAML events into plain values, with the line of every part.

The events are walked with an explicit stack, so no input can exhaust the interpreter's. What
:mod:`patternsearch.schema.reading` promises to refuse in YAML is refused here, on arrival.
"""

import math
import re
from typing import Any, NoReturn

import yaml

from patternsearch.errors import InputError

__all__ = ["MAX_DEPTH", "PLACEHOLDER", "Walker", "shown"]

MAX_DEPTH = 64
"""Containers inside one another; the deepest document of ours needs eight."""

PLACEHOLDER = "json-item"
"""Stands in the text for a list item that has been parsed already."""

_MAX_TOP_LEVEL_KEYS = 256
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,29})")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_AMBIGUOUS = re.compile(
    r"(yes|no|on|off|true|false|null)|[-+]?0[xob][0-9a-f_]+|[-+]?[0-9][0-9_]*", re.IGNORECASE
)
_CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}


class Walker:
    """Builds plain values from the YAML events of one document.

    Args:
        name: stands for the document in messages.
        text: the document.
        items: the lines (from 0) whose list item is a placeholder.
        error: the class of error to raise.

    Attributes:
        placed: where the placeholders stood: list, index in it, line. The value there is None.
    """

    def __init__(self, name: str, text: str, items: set[int], error: type[InputError]) -> None:
        self._name = name
        self._text = text
        self._items = items
        self._error = error
        self._lines: dict[int, Any] = {}
        self._stack: list[Any] = []
        self._keys: list[str | None] = []
        self.placed: list[tuple[list[Any], int, int]] = []

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
        events: Any = yaml.parse(self._text, Loader=_Loader)
        for event in events:
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
            self._fail(line, f"key {shown(key)} is not a string: quote it")
        mapping = self._stack[-1]
        if key in mapping:
            first = self._lines[id(mapping)][key] + 1
            self._fail(line, f"key {shown(key)} stands twice, first in line {first}")
        if len(self._stack) == 1 and len(mapping) >= _MAX_TOP_LEVEL_KEYS:
            self._fail(line, f"more than {_MAX_TOP_LEVEL_KEYS} keys: not a document of ours")
        self._keys[-1] = key
        self._lines[id(mapping)][key] = line

    def _add(self, value: Any, line: int) -> None:
        container = self._stack[-1]
        if isinstance(container, dict):
            key = self._keys[-1]
            if key is None:
                self._fail(line, "a mapping or list as a key: keys are strings")
            container[key] = value
            self._keys[-1] = None
        else:
            container.append(value)
            self._lines[id(container)].append(line)

    def _scalar(self, event: Any, line: int) -> Any:
        value = event.value
        if event.style:  # plain is None, or "" from libyaml
            return value
        if value == PLACEHOLDER and line in self._items and isinstance(self._stack[-1], list):
            self.placed.append((self._stack[-1], len(self._stack[-1]), line))
            return None
        return self._plain(value, line)

    def _plain(self, text: str, line: int) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                self._fail(line, f"{shown(text)} is not a finite number")
            return number
        if _NOT_FINITE.fullmatch(text):
            self._fail(line, f"{text} is not a finite number (quote it if it is a word)")
        if _AMBIGUOUS.fullmatch(text):
            self._fail(
                line,
                f"{shown(text)} means different things to different YAML readers: write true, "
                "false, null or a plain decimal number, or quote it",
            )
        return text


def shown(text: str) -> str:
    """Return ``text`` quoted for a message, shortened to 60 characters."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
