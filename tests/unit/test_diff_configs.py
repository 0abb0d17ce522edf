"""Differences of configs by meaning."""

import json

import pytest
import yaml

from patternsearch.exchange.diff import diff_files
from patternsearch.exchange.diff_output import diff_document, diff_markdown
from patternsearch.exchange.export import export_config, write_export
from patternsearch.schema import io
from patternsearch.schema.config import PatternConfig
from support.configs import (
    MINFERENCE_PATTERNS,
    VERTICAL_SLASH_PATTERNS,
    make_config,
    make_document,
)


@pytest.fixture
def compare(tmp_path):
    """Write two documents, the second a changed copy of the first, and compare them."""

    def run(change, **kwargs):
        a, b = make_document(**kwargs), make_document(**kwargs)
        change(b)
        for name, document in (("a", a), ("b", b)):
            io.dump_config(PatternConfig.model_validate(document), tmp_path / f"{name}.yaml")
        return diff_files(tmp_path / "a.yaml", tmp_path / "b.yaml")

    return run


def test_reordered_keys_float_forms_and_provenance_are_no_difference(tmp_path):
    document = make_document(3, 4, 2)
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    io.dump_config(PatternConfig.model_validate(document), a)
    document = json.loads(json.dumps(document))
    document["provenance"]["torch"] = "9.9.9"
    document["model"]["reference"] = "somewhere/else"
    document["calibration"]["row_sample"] = 1
    b.write_text(yaml.safe_dump(dict(reversed(document.items())), sort_keys=False))
    diff = diff_files(a, b)
    assert not diff.differs("any")
    assert [change.name for change in diff.provenance] == ["torch"]


def test_diff_of_a_file_with_itself_is_empty(compare):
    diff = compare(lambda document: None)
    assert diff.layers == diff.identity == diff.calibration == diff.selection == diff.notes == ()
    assert not any(diff.differs(on) for on in ("any", "pattern", "budget", "identity"))


def _set(*path, value):
    def change(document):
        for part in path[:-1]:
            document = document[part]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "part", "name"),
    [
        (("model", "weights_sha256"), "0" * 64, "identity", "weights_sha256"),
        (("model", "tokenizer_sha256"), None, "identity", "tokenizer_sha256"),
        (("model", "num_kv_heads"), 4, "identity", "num_kv_heads"),
        (("model", "rope", "full", "attention_factor"), 1.25, "identity",
         "rope.full.attention_factor"),
        (("model", "rope", "full", "parameters", "rope_theta"), 5e5, "identity",
         "rope.full.parameters.rope_theta"),
        (("fingerprints",), None, "identity", "fingerprints"),
        (("calibration", "seed"), 7, "calibration", "seed"),
        (("calibration", "recipe_sha256"), "0" * 64, "calibration", "recipe_sha256"),
        (("calibration", "samples", 0, "sha256"), "0" * 64, "calibration", "samples"),
        (("selection", "target_mass"), 0.9, "selection", "target_mass"),
    ],
)  # fmt: skip
def test_changed_fields_are_named_in_their_part(compare, path, value, part, name):
    diff = compare(_set(*path, value=value))
    assert [change.name for change in getattr(diff, part)] == [name]
    assert diff.differs("any")
    assert diff.differs("identity") == (part == "identity")
    assert not diff.differs("pattern")
    assert not diff.differs("budget")
    assert not diff.differs("never")


def test_changed_layers_of_the_weights_are_named(compare):
    def change(document):
        for layer in (3, 11):
            document["model"]["attention_sha256"][layer] = "f" * 64

    (field,) = compare(change, num_layers=12).identity
    assert field.name == "attention_sha256"
    assert "2 of 12 differ, at 3, 11" in field.a


def test_tensor_parallel_layout_is_identity(compare):
    other = make_document(tp_size=2)["tensor_parallel"]
    diff = compare(_set("tensor_parallel", value=other))
    assert {change.name for change in diff.tensor_parallel} == {"size", "ranks"}
    assert diff.differs("identity")


@pytest.mark.parametrize(
    ("pattern", "what", "on"),
    [
        ({"kind": "a_shape", "sink": 4, "window": 64, "tile": 64}, "pattern",
         ["any", "pattern", "budget"]),
        ({"kind": "vertical_slash", "estimator": "last_q", "vertical": 5, "slash": 5, "tile": 64},
         "budget", ["any", "budget"]),
    ],
)  # fmt: skip
def test_changed_heads_are_counted_by_sort(compare, pattern, what, on):
    def change(document):
        document["heads"][1][2]["pattern"] = pattern
        document["heads"][1][2]["lengths"][-1]["mass_worst_region"] = 0.5
        document["heads"][1][2]["lengths"][-1]["density"] = 0.9

    diff = compare(change, patterns=VERTICAL_SLASH_PATTERNS)
    (layer,) = diff.layers
    (head,) = layer.heads
    assert (layer.layer, head.layer, head.head, head.what) == (1, 1, 2, what)
    assert head.b.kind == pattern["kind"]
    assert head.score[1] == 0.5
    assert head.density[1] == layer.heads[0].density[1] == 0.9
    assert not head.is_stale
    assert diff.count(what) == 1
    assert diff.length == 4096
    assert diff.most_moved() == (layer,)
    assert [o for o in ("any", "pattern", "budget", "identity") if diff.differs(o)] == on


def test_changed_numbers_alone_are_a_difference_of_the_weakest_sort(compare):
    diff = compare(
        _set("heads", 0, 1, "lengths", 0, "mass_mean", value=0.5), patterns=VERTICAL_SLASH_PATTERNS
    )
    assert diff.count("numbers") == 1
    assert diff.differs("any")
    assert not diff.differs("budget")
    assert diff.most_moved() == ()


def test_another_budget_with_the_same_masses_is_stale(compare):
    def change(document):
        document["heads"][0][0]["pattern"]["vertical"] = 77

    diff = compare(change, patterns=VERTICAL_SLASH_PATTERNS)
    assert diff.count("stale") == diff.count("budget") == 1


def test_masses_of_other_physical_sets_are_not_subtracted(compare):
    def change(document):
        document["calibration"]["consumer"] = "minference"

    diff = compare(change)
    assert not diff.is_score_comparable
    assert diff.score_kind[0] != diff.score_kind[1]
    assert diff.layers == ()


def test_no_common_length_compares_patterns_only(tmp_path):
    io.dump_config(make_config(lengths=(1024,)), tmp_path / "a.yaml")
    io.dump_config(make_config(lengths=(2048,)), tmp_path / "b.yaml")
    diff = diff_files(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert diff.length is None
    assert any("no calibrated length in common" in note for note in diff.notes)
    assert all(head.density == (None, None) for layer in diff.layers for head in layer.heads)


def test_totals_sum_heads_at_the_common_length(tmp_path):
    config = make_config(measured=True)
    io.dump_config(config, tmp_path / "a.yaml")
    totals, _ = diff_files(tmp_path / "a.yaml", tmp_path / "a.yaml").totals
    last = [head.lengths[-1] for heads in config.heads for head in heads]
    assert totals.density == pytest.approx(sum(at.density for at in last) / len(last))
    assert totals.predicted_ms == pytest.approx(sum(at.predicted_ms for at in last))
    assert sum(totals.kinds.values()) == len(last)


def test_layers_that_are_full_attention_on_one_side_only(tmp_path):
    io.dump_config(make_config(2, 4, 2), tmp_path / "a.yaml")
    hybrid = make_config(2, 4, 2, layer_types=["full", "sliding"])
    io.dump_config(hybrid, tmp_path / "b.yaml")
    diff = diff_files(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert {change.name for change in diff.identity} >= {"layer_types"}
    heads = [head for layer in diff.layers if layer.layer == 1 for head in layer.heads]
    assert len(heads) == 4
    assert all(head.b is None for head in heads)


def test_an_export_is_compared_by_the_config_in_its_sidecar(tmp_path):
    config = make_config(2, 4, 2, patterns=MINFERENCE_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "a.yaml")
    path, _ = write_export(export_config(config, "minference"), tmp_path / "x.json")
    diff = diff_files(tmp_path / "a.yaml", path)
    assert diff.b[1] == "export"
    assert not diff.differs("any")


def test_a_hand_edited_export_is_told_with_its_heads(tmp_path):
    config = make_config(2, 4, 2, patterns=VERTICAL_SLASH_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "a.yaml")
    path, _ = write_export(export_config(config, "minference"), tmp_path / "x.json")
    document = json.loads(path.read_text())
    document[1]["2"][1] = 4242
    path.write_text(json.dumps(document))
    diff = diff_files(tmp_path / "a.yaml", path)
    assert diff.b[1] == "edited export"
    assert any("edited by hand since its export: 1 heads" in note for note in diff.notes)
    (layer,) = diff.layers
    (head,) = layer.heads
    assert (head.layer, head.head, head.what, head.b.vertical) == (1, 2, "budget", 4242)


def test_a_bare_file_compares_with_a_config_by_pattern_only(tmp_path):
    config = make_config(2, 4, 2, patterns=MINFERENCE_PATTERNS, consumer="minference")
    io.dump_config(config, tmp_path / "a.yaml")
    (tmp_path / "x.json").write_text(export_config(config, "minference").text)
    diff = diff_files(tmp_path / "a.yaml", tmp_path / "x.json")
    assert diff.layers == ()
    assert not diff.is_score_comparable
    assert any("bare pattern file" in note for note in diff.notes)


def test_output_forms_say_the_same(compare):
    def change(document):
        document["heads"][1][2]["pattern"] = {"kind": "dense"}
        document["model"]["weights_sha256"] = "0" * 64

    diff = compare(change, patterns=VERTICAL_SLASH_PATTERNS)
    document = json.loads(json.dumps(diff_document(diff), allow_nan=False))
    assert document["heads"] == {"pattern": 1, "budget": 0, "numbers": 0, "stale": 1}
    assert document["layers"][0]["heads"][0]["b"] == {"kind": "dense"}
    assert document["differs"]["identity"] is True
    text = diff_markdown(diff)
    assert "| `weights_sha256` |" in text
    assert "| 1 | 2 | vertical_slash" in text
    assert all(line.count("|") >= 4 for line in text.splitlines() if line.startswith("|"))
