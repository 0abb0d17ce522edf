"""Importing bare files: strict, with nothing invented."""

import json

import pytest

from patternsearch.errors import ConfigError
from patternsearch.exchange.importing import import_pattern_file
from patternsearch.exchange.pattern_file import read_pattern_file, score_kind
from patternsearch.patterns.candidates import AShape, BlockSparse, Dense, VerticalSlashLastQ
from patternsearch.schema.config import ModelIdentity
from support.configs import make_model

VS = "vertical_and_slash"


def _model(**changes):
    return ModelIdentity.model_validate(make_model(**changes))


def _write(tmp_path, document):
    path = tmp_path / "x.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def _entries(*entries):
    return [{str(head): list(entry) for head, entry in enumerate(entries)}]


def test_imported_config_says_what_the_engine_runs_and_invents_nothing(tmp_path):
    document = _entries(
        (VS, 30, 800, 0.5),
        ("stream_llm", 100, 800, 0.6),
        ("block_sparse", 1000, 6096, 0.7),
        (VS, 2**20, 2**20, 1.0),
    )
    path = _write(tmp_path, document)
    config, patterns = import_pattern_file(path, "minference", _model(num_layers=1))
    heads = config.heads[0]
    assert [head.pattern for head in heads] == [
        VerticalSlashLastQ(vertical=30, slash=800, tile=64),
        AShape(sink=100, window=800, tile=64),
        BlockSparse(estimator="pooled", blocks=100, tile=64),
        Dense(),
    ]
    assert [head.imported_score for head in heads] == [0.5, 0.6, 0.7, 1.0]
    assert all(head.lengths == () and head.runner_up is None for head in heads)
    assert config.calibration is config.selection is config.fingerprints is None
    assert config.imported.format == "minference"
    assert config.imported.score_kind == patterns.score_kind == "mass"


def test_dual_chunk_engines_run_30_columns_as_130(tmp_path):
    path = _write(tmp_path, _entries((VS, 30, 800, 0.5), (VS, 31, 800, 0.5)))
    for engine in ("vllm", "sglang"):
        config, patterns = import_pattern_file(
            path, engine, _model(num_layers=1, num_query_heads=2, num_kv_heads=1)
        )
        assert [head.pattern.vertical for head in config.heads[0]] == [130, 31]
        assert patterns.num_bumped == 1


@pytest.mark.parametrize("name", ["stream_llm", "block_sparse"])
def test_kinds_that_dual_chunk_engines_assert_against_are_refused(tmp_path, name):
    path = _write(tmp_path, _entries((VS, 100, 800, 0.5), (name, 100, 800, 0.5)))
    model = _model(num_layers=1, num_query_heads=2, num_kv_heads=1)
    with pytest.raises(ConfigError, match=f"layer 0 head 1: unknown pattern '{name}'"):
        import_pattern_file(path, "vllm", model)


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ((0.1, 1.0005), "mass"),
        ((0, 21_960_054), "mismatch_count"),
        ((None, None), "none"),
        ((None, 0.5), "unknown"),
        ((0, 1), "unknown"),
        ((0.5, 7.5), "unknown"),
        ((-0.5, 0.5), "unknown"),
    ],
)
def test_score_kind_is_detected(tmp_path, scores, kind):
    path = _write(tmp_path, _entries(*((VS, 100, 800, score) for score in scores)))
    assert score_kind(read_pattern_file(path)) == kind


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "not valid JSON"),
        ('[{"0": ["vertical_and_slash", 1000', r"x.json:1: .*truncated"),
        ('[{"0": [],\n "0": []}]', "'0' stands twice"),
        ('[{"0": ["vertical_and_slash", 1, 1, NaN]}]', "not a finite number"),
        ('[{"0": ["vertical_and_slash", 1, 1, 1e999]}]', "not a finite number"),
        ([], "the list of layers is empty"),
        ([{}], "layer 0 has no heads"),
        ([[]], r"layer 0 is \[\]"),
        ({"config_groups": {}}, "Model-Optimizer"),
        ({"0": {}}, "a JSON list of layers"),
        ({"format": "patternsearch/config"}, "has format 'patternsearch/config'"),
        ([{"0": [VS, 1, 1, 1], "2": [VS, 1, 1, 1]}], "layer 0 lacks head 1"),
        ([{"0": [VS, 1, 1, 1]}, {"0": [VS, 1, 1, 1], "1": [VS, 1, 1, 1]}], "layer 1 has '1'"),
        ([{"0": [VS, 1, 1, 1], "x": [VS, 1, 1, 1]}], "lacks head 1"),
        ([{"0": [VS, 1, 1, 1], "01": [VS, 1, 1, 1]}], "lacks head 1"),
        ([{"0": [VS, 1, 1]}], "must be .pattern, vertical, slash, score."),
        ([{"0": [VS, "1000", 1, 1]}], 'vertical "1000"'),
        ([{"0": [VS, 1000, 1.5, 1]}], "slash 1.5"),
        ([{"0": [VS, True, 1, 1]}], "vertical true"),
        ([{"0": [VS, -1, 1, 1]}], "vertical -1"),
        ([{"0": [VS, 2**31, 1, 1]}], "vertical 2147483648"),
        ([{"0": [VS, 1, 1, "0.5"]}], 'score "0.5"'),
        ([{"0": [VS, 1, 1, True]}], "score true"),
        ([{"0": [5, 1, 1, 1]}], "pattern 5"),
        ([{"0": ["", 1, 1, 1]}], 'pattern ""'),
    ],
)
def test_faults_are_refused_with_their_place(tmp_path, document, words):
    with pytest.raises(ConfigError, match=words):
        read_pattern_file(_write(tmp_path, document))


def test_unknown_kinds_and_empty_windows_are_refused(tmp_path):
    model = _model(num_layers=1, num_query_heads=1, num_kv_heads=1)
    for entry, words in (
        (("tri_shape", 1, 1, 1), "unknown pattern 'tri_shape': minference runs"),
        (("stream_llm", 1, 0, 1), "window of 0"),
    ):
        path = _write(tmp_path, _entries(entry))
        with pytest.raises(ConfigError, match=f"layer 0 head 0: .*{words}"):
            import_pattern_file(path, "minference", model)


def test_a_file_of_another_model_is_refused(tmp_path):
    path = _write(tmp_path, _entries((VS, 30, 800, 0.5)))
    with pytest.raises(ConfigError, match="1 layers × 1 heads, tests/model has 2 × 4"):
        import_pattern_file(path, "minference", _model())
    hybrid = _model(num_layers=1, num_query_heads=1, num_kv_heads=1, layer_types=["sliding"])
    with pytest.raises(ConfigError, match="sliding-attention"):
        import_pattern_file(path, "minference", hybrid)
