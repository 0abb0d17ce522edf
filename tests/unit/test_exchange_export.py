"""Exporting: what is refused, what is noted, what is never overwritten."""

import json

import pytest

from patternsearch.errors import ConfigError, InputError
from patternsearch.exchange.export import export_config, name_heads, write_export
from patternsearch.exchange.importing import find_own_export
from patternsearch.exchange.sidecar import sidecar_path
from patternsearch.patterns.candidates import AShape, BlockSparse, VerticalSlashLastQ
from patternsearch.schema import io
from support.configs import (
    MINFERENCE_PATTERNS,
    PATTERNS,
    VERTICAL_SLASH_PATTERNS,
    make_config,
)


@pytest.fixture
def vertical_slash():
    return make_config(2, 4, 2, patterns=VERTICAL_SLASH_PATTERNS, consumer="vllm")


def test_inexpressible_heads_are_refused_by_name():
    config = make_config(2, 4, 2, patterns=PATTERNS)
    with pytest.raises(ConfigError, match="--reselect") as caught:
        export_config(config, "vllm")
    message = str(caught.value)
    for layer, heads in enumerate(config.heads):
        for head, entry in enumerate(heads):
            if entry.pattern.kind != "dense":
                assert f"layer {layer}" in message, (layer, head)
    for pattern in {h.pattern for heads in config.heads for h in heads}:
        assert (pattern.kind in message) == (pattern.kind != "dense")


@pytest.mark.parametrize(
    ("pattern", "minference", "dual_chunk"),
    [
        (AShape(sink=100, window=800, tile=64), True, False),
        (AShape(sink=100, window=800, tile=128), False, False),
        (BlockSparse(estimator="pooled", blocks=100, tile=64), True, False),
        (BlockSparse(estimator="pooled", blocks=64, tile=64), False, False),
        (BlockSparse(estimator="pooled_query", blocks=100, tile=64), False, False),
        (VerticalSlashLastQ(vertical=100, slash=750, tile=64), True, True),
        (VerticalSlashLastQ(vertical=100, slash=750, tile=128), False, False),
        (VerticalSlashLastQ(vertical=100, slash=750, tile=64, last_q=32), False, False),
    ],
)
def test_legal_kinds_differ_by_consumer(pattern, minference, dual_chunk):
    config = make_config(1, 2, 1, patterns=(pattern,))
    for consumer, is_legal in (
        ("minference", minference),
        ("vllm", dual_chunk),
        ("sglang", dual_chunk),
    ):
        if is_legal:
            assert export_config(config, consumer).text
        else:
            with pytest.raises(ConfigError, match="layer 0 heads 0-1"):
                export_config(config, consumer)


def test_layers_of_other_attention_are_refused():
    config = make_config(
        3, 4, 2, patterns=MINFERENCE_PATTERNS, layer_types=["full", "sliding", "sliding"]
    )
    with pytest.raises(ConfigError, match="sliding attention of layers 1-2"):
        export_config(config, "minference")


def test_thirty_columns_are_written_as_31_where_30_runs_as_130():
    pattern = VerticalSlashLastQ(vertical=30, slash=800, tile=64)
    config = make_config(1, 2, 1, patterns=(pattern,), consumer="minference")
    for consumer, written in (("minference", 30), ("vllm", 31), ("sglang", 31)):
        export = export_config(config, consumer)
        assert json.loads(export.text)[0]["0"][:3] == ["vertical_and_slash", written, 800]
        assert any("as 130" in note for note in export.notes) == (written == 31)


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
@pytest.mark.parametrize(("measured", "threshold"), [(False, 32768), (True, 50_000)])
def test_thresholds_go_to_the_model_config(consumer, measured, threshold):
    config = make_config(1, 2, 1, patterns=VERTICAL_SLASH_PATTERNS, measured=measured)
    if measured:
        selection = config.selection.model_copy(update={"min_length": 50_000})
        config = config.model_copy(update={"selection": selection})
    assert export_config(config, consumer).model_config == {
        "dual_chunk_attention_config": {
            "sparse_attention_enabled": True,
            "sparse_attention_threshold": threshold,
            "sparse_attention_last_q": 64,
        }
    }
    assert export_config(config, "minference").model_config == {}


def test_other_physical_sets_and_odd_head_dims_are_noted(vertical_slash):
    ours = make_config(1, 2, 1, patterns=VERTICAL_SLASH_PATTERNS)
    assert any("other keys" in note for note in export_config(ours, "minference").notes)
    assert not any("other keys" in note for note in export_config(vertical_slash, "vllm").notes)
    model = vertical_slash.model.model_copy(update={"head_dim": 96})
    odd = vertical_slash.model_copy(update={"model": model})
    assert any("96" in note for note in export_config(odd, "minference").notes)


def test_writing_again_replaces_our_own_export(vertical_slash, tmp_path):
    export = export_config(vertical_slash, "vllm")
    path, sidecar = write_export(export, tmp_path)
    assert path.name == "sparse_attention_config.json"
    assert write_export(export, tmp_path) == (path, sidecar)
    assert find_own_export(path).is_edited is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"config_groups": {}}', "Model-Optimizer"),
        ('{"use_sparse_attention": true}', "model's own"),
        ("[]", "was not written by patternsearch"),
        ("garbage", "was not written by patternsearch"),
    ],
)
def test_a_foreign_file_is_never_replaced_unasked(vertical_slash, tmp_path, text, words):
    path = tmp_path / "sparse_attention_config.json"
    path.write_text(text)
    export = export_config(vertical_slash, "vllm")
    with pytest.raises(InputError, match=f"{words}.*--force"):
        write_export(export, path)
    assert path.read_text() == text
    assert not sidecar_path(path).exists()
    write_export(export, path, force=True)
    assert path.read_text() == export.text


def test_a_hand_edited_export_is_never_replaced_unasked(vertical_slash, tmp_path):
    export = export_config(vertical_slash, "vllm")
    path, _ = write_export(export, tmp_path / "x.json")
    path.write_text(export.text.replace("3500", "3600", 1) + " ")
    with pytest.raises(InputError, match="was edited since"):
        write_export(export, path)
    assert find_own_export(path).is_edited


def test_a_foreign_or_edited_sidecar_is_noticed(vertical_slash, tmp_path):
    export = export_config(vertical_slash, "vllm")
    path, sidecar = write_export(export, tmp_path / "x.json")
    text = sidecar.read_text()
    sidecar.write_text(text.replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(ConfigError, match="does not match its digest"):
        find_own_export(path)
    sidecar.write_text("{}")
    with pytest.raises(InputError, match=r"something else.*--force"):
        write_export(export, path)
    write_export(export, path, force=True)
    assert find_own_export(path).sidecar.config == vertical_slash


def test_the_sidecar_brings_the_whole_config_back(vertical_slash, tmp_path):
    path, _ = write_export(export_config(vertical_slash, "sglang"), tmp_path / "x.json")
    own = find_own_export(path)
    assert own.sidecar.consumer == "sglang"
    assert own.sidecar.config == vertical_slash
    assert io.dumps_config(own.sidecar.config) == io.dumps_config(vertical_slash)


def test_output_names(vertical_slash, tmp_path):
    with pytest.raises(InputError, match=r"ends in \.json"):
        write_export(export_config(vertical_slash, "vllm"), tmp_path / "x.yaml")
    with pytest.raises(InputError, match="does not exist"):
        write_export(export_config(vertical_slash, "vllm"), tmp_path / "no" / "x.json")


def test_name_heads():
    at = [(0, 0), (0, 1), (0, 2), (0, 5), (3, 1)]
    assert name_heads(at) == "layer 0 heads 0-2,5; layer 3 head 1"
    assert name_heads([(i, 0) for i in range(20)], limit=2) == (
        "layer 0 head 0; layer 1 head 0; and 18 more layers"
    )
