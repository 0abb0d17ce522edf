# SPDX-License-Identifier: Apache-2.0
"""The one way a document is written: fixed layout, fixed float form, LF, a final newline.

Layout, the same for YAML and JSON: mappings and lists of containers take a line an item; a list
of plain values, and a mapping inside a list (a head, a sample), is one line of JSON. In YAML such
a line is found and parsed by :mod:`patternsearch.schema.reading` at the speed of JSON.

Floats are written as the shortest decimal that reads back the same, always with a point, so that
every YAML and JSON reader takes them for floats.
"""

import hashlib
import json
import re
from typing import Any

from patternsearch.errors import InputError

__all__ = ["canonical_json", "canonical_sha256", "canonical_yaml", "compact_json"]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./+-]{0,38}")  # digests are longer and always quoted
_RESERVED = re.compile(r"(null|true|false|yes|no|on|off|y|n|nan|inf|infinity)", re.IGNORECASE)
_POINTLESS = re.compile(r"(?:^|[\[ ])-?[0-9]+e[-+]?[0-9]")  # 1e-05, which YAML 1.1 takes for text
_NOT_PRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def canonical_yaml(value: dict[str, Any]) -> str:
    """Write a mapping of plain values as canonical YAML."""
    lines: list[str] = []
    _yaml_mapping(value, "", lines)
    return "\n".join(lines) + "\n"


def canonical_json(value: dict[str, Any]) -> str:
    """Write a mapping of plain values as canonical JSON."""
    return _json_block(value, "") + "\n"


def canonical_sha256(value: Any) -> str:
    """Return the SHA-256 (hex) of the compact JSON of ``value``, keys sorted."""
    return hashlib.sha256(compact_json(value, sort_keys=True).encode()).hexdigest()


def compact_json(value: Any, *, sort_keys: bool = False) -> str:
    """Write plain values as one line of JSON with canonical floats.

    Raises:
        InputError: a number is not finite, or a value is no plain value.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except ValueError:
        raise InputError(
            "a number in the document is not finite: nan and inf cannot be kept"
        ) from None
    except TypeError as problem:
        raise InputError(f"the document holds a value that cannot be written: {problem}") from None
    if _POINTLESS.search(text):
        # Rare, and perhaps inside a string: spell this value out in Python.
        return _spell(value, sort_keys)
    return _escape(text)


def _spell(value: Any, sort_keys: bool) -> str:
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict):
        items = sorted(value.items()) if sort_keys else value.items()
        inner = ", ".join(f"{_string(key)}: {_spell(item, sort_keys)}" for key, item in items)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_spell(item, sort_keys) for item in value)}]"
    return _escape(json.dumps(value, ensure_ascii=False))


def _float(value: float) -> str:
    text = float.__repr__(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def _string(value: str) -> str:
    return _escape(json.dumps(value, ensure_ascii=False))


def _escape(text: str) -> str:
    """Escape the characters of JSON text that YAML does not take as they are."""
    if text.isascii() and "\x7f" not in text:
        return text
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _is_one_line(value: Any) -> bool:
    """Whether a value that is no list item is written as one line."""
    if not _is_container(value) or not value:
        return True
    return not isinstance(value, dict) and not any(map(_is_container, value))


def _yaml_mapping(value: dict[str, Any], indent: str, lines: list[str]) -> None:
    for key, item in value.items():
        head = f"{indent}{_yaml_string(key)}:"
        if _is_one_line(item):
            lines.append(f"{head} {_yaml_scalar(item)}")
            continue
        lines.append(head)
        if isinstance(item, dict):
            _yaml_mapping(item, indent + "  ", lines)
        else:
            _yaml_sequence(item, indent + "  ", lines)


def _yaml_sequence(value: Any, indent: str, lines: list[str]) -> None:
    for index, item in enumerate(value):
        if isinstance(item, dict) or _is_one_line(item):
            lines.append(f"{indent}- {compact_json(item)}")
        else:
            # A list of lists is indexed by layer wherever it occurs.
            lines.append(f"{indent}- # layer {index}")
            _yaml_sequence(item, indent + "  ", lines)


def _yaml_scalar(value: Any) -> str:
    return _yaml_string(value) if isinstance(value, str) else compact_json(value)


def _yaml_string(value: str) -> str:
    if _PLAIN.fullmatch(value) and not _RESERVED.fullmatch(value):
        return value
    return _string(value)


def _json_block(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        items = [
            f"{inner}{_string(key)}: {_json_block(item, inner)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if _is_one_line(value):
        return compact_json(value)
    items = [
        inner + (compact_json(item) if isinstance(item, dict) else _json_block(item, inner))
        for item in value
    ]
    return "[\n" + ",\n".join(items) + f"\n{indent}]"
