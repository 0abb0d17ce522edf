"""The strict reader: what it accepts is what JSON and YAML 1.2 agree on; the rest is refused."""

import json
import os
import time

import pytest

from patternsearch.errors import ConfigError, RecipeError
from patternsearch.schema import reading
from patternsearch.schema.reading import load_document, parse_source


def _yaml(text):
    return parse_source(text.encode(), "x.yaml").value


def _json(text):
    return parse_source(text.encode(), "x.json").value


def test_yaml_scalars_follow_the_json_schema_of_yaml_1_2():
    text = """
a: 1
b: -2.5
c: 1e-05
d: true
e: null
f: plain words
g: "1"
h: '2'
i: [1, x, {"k": 0.5}]
j:
  - 1.0e-07
  - {"a": [1, 2]}
  - {a: 1}  # flow style, and a comment
k: 2024-01-01
l: ~
m:
"""
    value = _yaml(text)
    assert value == {
        "a": 1, "b": -2.5, "c": 1e-05, "d": True, "e": None, "f": "plain words", "g": "1",
        "h": "2", "i": [1, "x", {"k": 0.5}], "j": [1e-07, {"a": [1, 2]}, {"a": 1}],
        "k": "2024-01-01", "l": None, "m": None,
    }  # fmt: skip
    assert type(value["a"]) is int
    assert type(value["d"]) is bool


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        pytest.param("a: &x 1\nb: *x\n", 1, "anchor", id="anchor"),
        pytest.param("a: 1\nb: *x\n", 2, "alias", id="alias"),
        pytest.param("a: 1\nb: !!python/object:os.system x\n", 2, "tag", id="tag"),
        pytest.param("a: 1\nb: 2\na: 3\n", 3, "twice, first in line 1", id="duplicate"),
        pytest.param("a:\n  b: 1\n  b: 2\n", 3, "twice", id="nested duplicate"),
        pytest.param("a: 1\nb: {c: 1, c: 2}\n", 2, "twice", id="flow duplicate"),
        pytest.param('a:\n  - {"b": 1, "b": 2}\n', 2, "twice", id="duplicate in a JSON line"),
        pytest.param("a: .nan\n", 1, "finite", id="nan"),
        pytest.param("a: -.inf\n", 1, "finite", id="inf"),
        pytest.param("a: NaN\n", 1, "finite", id="NaN as a word"),
        pytest.param("a: 1e999\n", 1, "finite", id="overflow"),
        pytest.param('a:\n  - {"b": 1e999}\n', 2, "finite", id="overflow in a JSON line"),
        pytest.param('a:\n  - {"b": NaN}\n', 2, "finite", id="NaN in a JSON line"),
        pytest.param("a: yes\n", 1, "different YAML readers", id="yes"),
        pytest.param("a: 0x10\n", 1, "different YAML readers", id="hexadecimal"),
        pytest.param("a: 010\n", 1, "different YAML readers", id="octal"),
        pytest.param("a: 1_000\n", 1, "different YAML readers", id="underscores"),
        pytest.param("a: TRUE\n", 1, "different YAML readers", id="upper case"),
        pytest.param("1: a\n", 1, "not a string", id="number as key"),
        pytest.param("? [1]\n: a\n", 1, "key", id="list as key"),
        pytest.param("a: 1\n---\nb: 2\n", 2, "second document", id="two documents"),
        pytest.param("a: [1, 2\nb: 3\n", 2, "not valid YAML", id="syntax"),
        pytest.param("a: 1\n\x01: 2\n", 2, "not valid YAML", id="control character"),
        pytest.param("a:\n  " + "[" * 500 + "]" * 500, 2, "deeper than 64", id="deep"),
    ],
)
def test_yaml_refuses_with_the_line(text, line, words):
    with pytest.raises(ConfigError, match=words) as caught:
        _yaml(text)
    assert str(caught.value).startswith(f"x.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param('{"a": 1,\n "b": [1, 2', "x.json:2: .*truncated", id="truncated"),
        pytest.param('{"a": 1, "a": 2}', "'a' stands twice", id="duplicate"),
        pytest.param('{"a": NaN}', "'NaN' is not a finite", id="NaN"),
        pytest.param('{"a": -Infinity}', "Infinity' is not a finite", id="Infinity"),
        pytest.param('{"a": 1e999}', "1e999' is not a finite", id="overflow"),
        pytest.param('{"a": ' + "9" * 5000 + "}", "thousands of digits", id="long integer"),
        pytest.param("[" * 100_000, "deeper than 64", id="recursion"),
        pytest.param("[" * 100 + "]" * 100, "deeper than 64", id="deep"),
        pytest.param('{"a": "\\ud800"}', "surrogate", id="lone surrogate"),
        pytest.param("{'a': 1}", "x.json:1: not valid JSON", id="single quotes"),
        pytest.param("", "x.json:1: not valid JSON", id="empty"),
    ],
)
def test_json_refuses(text, words):
    with pytest.raises(ConfigError, match=words):
        _json(text)


def test_brackets_inside_strings_are_no_depth():
    assert _json(json.dumps({"a": "[" * 1000})) == {"a": "[" * 1000}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('a: |\n  - {"b": 1}\n  - {"b": 2}\n', id="literal block"),
        pytest.param("a: \"x\n  - {'b': 1}\n  - [1]\n  \"\n", id="quoted over lines"),
        pytest.param('a: x\n  - {"b": 1}\n', id="plain over lines"),
        pytest.param('a:\n  - {"b": [{}}\n  - {}]}\n', id="halves"),
        pytest.param('a:\n  - {"b": [{}\n  - {}]}\n  - {}, {}\n', id="halves that add up"),
        pytest.param('a:\n  - {"b": "\\u0000"}\n  - {"c": 1}\n', id="escapes"),
        pytest.param('a:\n  - {b: 1}\n  - {"c": 1}\nd: "\\0" \n', id="mixed"),
        pytest.param('a:\n  - ["next item"]\n  - {"c": "next item"}\n', id="separator"),
        pytest.param('a:\n  - {"b": 1}\nc:\n  - "\\0002\\0"\n  - "\\0001\\0"\n', id="marks"),
        pytest.param('- {"b": 1}\n- json-item\n- [2]\n', id="placeholder"),
        pytest.param('a:\r\n  - {"b": 1}\r\n', id="CRLF"),
    ],
)
def test_json_lines_read_as_the_yaml_parser_reads_them(text, monkeypatch):
    def outcome():
        try:
            source = parse_source(text.encode(), "x.yaml")
        except ConfigError:
            return "refused"
        assert source.json_text is None or json.loads(source.json_text) == source.value
        return source.value

    fast = outcome()
    monkeypatch.setattr(reading, "_take_json_items", lambda text: (text, {}))
    assert fast == outcome()


def test_line_of_finds_the_deepest_known_part():
    text = 'a:\n  b:\n    - 1\n    - {"c": 2}\n    - {d: [1,\n        2]}\n'
    source = parse_source(text.encode(), "x.yaml")
    assert source.line_of(("a", "b", 0)) == 3
    assert source.line_of(("a", "b", 1, "c")) == 4
    assert source.line_of(("a", "b", 2, "d", 1)) == 6
    assert source.line_of(("a", "nothing")) == 1
    source = parse_source(b'{"a": 1,\n "b": [2,\n 3]}', "x.json")
    assert source.line_of(("b", 1)) == 3


def test_files_are_bounded_regular_and_utf8(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match="does not exist"):
        load_document(path)
    with pytest.raises(ConfigError, match="is a folder"):
        load_document(tmp_path)
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"x.yaml:2: byte 8 is not UTF-8"):
        load_document(path)
    path.write_bytes(b"a: " + b"x" * 100)
    with pytest.raises(RecipeError, match="larger than 64 bytes"):
        load_document(path, max_bytes=64, error=RecipeError)
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_document(pipe)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a" * 10_000_000, id="one word"),
        pytest.param("[" * 10_000_000, id="brackets"),
        pytest.param("".join(f"k{i}: 1\n" for i in range(900_000)), id="keys"),
        pytest.param("\0" * 10_000_000, id="zeros"),
        pytest.param(
            "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &b{i} [*a, *a, *a]\n" for i in range(20)),
            id="billion laughs",
        ),
    ],
)
def test_garbage_is_refused_or_read_without_delay(text, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    start = time.process_time()
    try:
        value = load_document(path)
    except ConfigError:
        value = None
    assert value is None or isinstance(value, str)
    assert time.process_time() - start < 2.0
