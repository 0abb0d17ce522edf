"""load ∘ dump is the identity, whatever a valid config holds; layout never matters."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.schema import io, reading
from patternsearch.schema.canonical import canonical_json, canonical_yaml
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.reading import parse_source
from support.configs import make_document

BUDGETS = st.integers(1, 2**31 - 1)
TILES = st.sampled_from([64, 128])
PATTERNS = st.one_of(
    st.just(Dense()),
    st.builds(AShape, sink=BUDGETS, window=BUDGETS, tile=TILES),
    st.builds(VerticalSlashSpread, vertical=BUDGETS, diagonals=BUDGETS, tile=TILES),
    st.builds(VerticalSlashLastQ, vertical=BUDGETS, slash=BUDGETS, tile=TILES, last_q=BUDGETS),
    st.builds(
        BlockSparse,
        estimator=st.sampled_from(["pooled_query", "pooled"]),
        blocks=BUDGETS,
        tile=TILES,
    ),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
WORDS = TEXT.map(lambda text: f"s{text}")
"""Strings that no YAML reader takes for a number; PyYAML leaves ``1e5`` unquoted."""
FRACTIONS = st.floats(0, 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def plain_values(text):
    return st.recursive(
        st.none() | st.booleans() | st.integers(-(10**25), 10**25) | NUMBERS | text,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=12,
    )


PLAIN = plain_values(TEXT)


@st.composite
def configs(draw, text=TEXT):
    document = make_document(2, 2, 1, lengths=(64,))
    document["model"]["reference"] = draw(text)
    document["model"]["attention_scale"] = draw(NUMBERS)
    document["model"]["rope"]["full"]["parameters"] = draw(
        st.dictionaries(text, plain_values(text), max_size=3)
    )
    document["calibration"]["recipe"] = draw(text)
    document["calibration"]["samples"][0]["source"] = draw(text)
    for heads in document["heads"]:
        for head in heads:
            head["pattern"] = draw(PATTERNS).model_dump()
            head["imported_score"] = draw(st.none() | NUMBERS)
            at = head["lengths"][0]
            for name in ("mass_mean", "mass_worst", "mass_worst_region", "density"):
                at[name] = draw(FRACTIONS)
            at["predicted_ms"] = draw(st.none() | st.floats(0, 1e300))
    return PatternConfig.model_validate(document)


@settings(max_examples=60, deadline=None)
@given(configs(), st.sampled_from(["yaml", "json"]))
def test_load_of_dump_is_the_identity_and_bytes_are_stable(config, form):
    text = io.dumps_config(config, form)
    loaded = io.config_from_source(parse_source(text.encode(), f"x.{form}"))
    assert loaded == config
    assert io.dumps_config(loaded, form) == text
    assert io.config_digest(loaded) == io.config_digest(config)


@settings(max_examples=60, deadline=None)
@given(configs(WORDS))
def test_forms_and_foreign_writers_agree(config):
    as_yaml = io.dumps_config(config, "yaml")
    as_json = io.dumps_config(config, "json")
    foreign = yaml.safe_dump(json.loads(as_json), sort_keys=True)
    for text, name in ((as_json, "x.json"), (foreign, "x.yaml")):
        loaded = io.config_from_source(parse_source(text.encode(), name))
        assert io.dumps_config(loaded, "yaml") == as_yaml


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(TEXT, PLAIN, min_size=1, max_size=5))
def test_any_plain_document_reads_back(value):
    for text, name in ((canonical_yaml(value), "x.yaml"), (canonical_json(value), "x.json")):
        source = parse_source(text.encode(), name)
        assert json.dumps(source.value) == json.dumps(value)
        assert source.json_text is None or json.loads(source.json_text) == value


@pytest.fixture(scope="module")
def slow_path():
    """The same reader with its fast path for JSON lines switched off."""

    def read(text):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reading, "_take_json_items", lambda text: (text, {}))
            return parse_source(text.encode(), "x.yaml").value

    return read


@settings(max_examples=150, deadline=None)
@given(st.lists(PLAIN, max_size=4), st.data())
def test_fast_and_slow_paths_read_the_same(slow_path, values, data):
    """Lines of JSON, some of them spoiled by an edit of one character."""
    lines = [f"  - {json.dumps(value, ensure_ascii=True)}" for value in values]
    text = "a:\n" + "\n".join(lines) + "\nb: 1\n"
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.sampled_from('{}[]",:#\n -x1e.')) + text[at + 1 :]

    def outcome(read):
        try:
            return json.dumps(read(text))
        except ValueError:
            return "refused"

    assert outcome(lambda t: parse_source(t.encode(), "x.yaml").value) == outcome(slow_path)
