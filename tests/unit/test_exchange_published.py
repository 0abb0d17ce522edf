"""All published MInference files: import, export back to the same values, compare pairwise."""

import json
from itertools import combinations

import pytest

from patternsearch.exchange.diff import diff_files
from patternsearch.exchange.export import export_config, write_export
from patternsearch.exchange.importing import find_own_export, import_pattern_file
from patternsearch.exchange.pattern_file import read_pattern_file, score_kind
from patternsearch.exchange.summary import summarise
from patternsearch.schema import io
from patternsearch.schema.config import ModelIdentity
from support.configs import make_model
from support.published import FILES, needs_published, published

pytestmark = needs_published

MISMATCH_COUNTS = {
    "Llama_3_8B_Instruct_262k_kv_out_v32_fit_o_best_pattern.json",
    "Yi_9B_200k_kv_out_v32_fit_o_best_pattern.json",
}


def _imported(path):
    layers, heads = read_pattern_file(path).shape
    model = make_model(num_layers=layers, num_query_heads=heads, num_kv_heads=heads)
    return import_pattern_file(path, "minference", ModelIdentity.model_validate(model))[0]


def test_all_fourteen_are_there():
    assert len(FILES) == 14


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name[:24])
def test_published_file_goes_in_and_out_unchanged(path, tmp_path):
    config = _imported(path)
    assert config.imported.score_kind == (
        "mismatch_count" if path.name in MISMATCH_COUNTS else "mass"
    )
    assert sum(summarise(config).kinds.values()) == sum(map(len, config.heads))

    if sum(map(len, config.heads)) > 1600 and "3.1_70B" not in path.name:
        return  # the rest is the same for every file, and takes seconds for the largest
    stored = tmp_path / "c.yaml"
    io.dump_config(config, stored)
    assert io.load_config(stored) == config

    export = export_config(config, "minference")
    original = json.loads(path.read_text())
    exported = json.loads(export.text)
    assert exported == original
    assert json.dumps(exported) == json.dumps(original), "types of numbers or order of heads"

    written, _ = write_export(export, tmp_path / "x.json")
    again = find_own_export(written).sidecar.config
    assert export_config(again, "minference").text == export.text
    assert not diff_files(path, written).layers


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in combinations(FILES, 2)
        if read_pattern_file(pair[0]).shape == read_pattern_file(pair[1]).shape
    ],
    ids=lambda pair: f"{pair[0].name[:20]}~{pair[1].name[:20]}",
)
def test_published_files_of_one_shape_compare(pair):
    kinds = [score_kind(read_pattern_file(path)) for path in pair]
    diff = diff_files(*pair)
    assert diff.has_same_shape
    assert diff.differs("any")
    assert diff.is_score_comparable == (kinds[0] == kinds[1])
    if not diff.is_score_comparable:
        heads = [head for layer in diff.layers for head in layer.heads]
        assert all(head.score == (None, None) and not head.is_stale for head in heads)
        assert any("cannot be compared" in note for note in diff.notes)


def test_the_hand_set_llama_file_has_stale_scores():
    diff = diff_files(
        published("Llama_3.1_8B_Instruct_128k_kv_out_v32_fit_o_best_pattern.json"),
        published("Llama_3.1_8B_Instruct_128k_kv_out_v32_fit_o_best_pattern_v2.json"),
    )
    assert diff.count("budget") == diff.count("stale") == 1024
    assert diff.count("pattern") == 0
    assert diff.totals[0].score == diff.totals[1].score
    assert any("stale" in note for note in diff.notes)


def test_other_shapes_are_reported_and_not_zipped():
    diff = diff_files(published("Qwen2_7B"), published("Yi_9B"))
    assert not diff.has_same_shape
    assert diff.layers == ()
    assert diff.differs("identity")
    assert any("28 layers × 28 heads against 48 × 32" in note for note in diff.notes)
