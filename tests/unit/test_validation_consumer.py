"""What an engine would trip over is named before it serves."""

import json

import pytest

from patternsearch.exchange.consumers import SPARSE_FILE_NAME
from patternsearch.exchange.export import export_config
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.schema.config import PatternConfig
from patternsearch.validation.consumer import check_consumer
from support.configs import (
    MINFERENCE_PATTERNS,
    VERTICAL_SLASH_PATTERNS,
    make_config,
    make_document,
)

DUAL_CHUNK = {
    "chunk_size": 262144,
    "local_size": 8192,
    "sparse_attention_enabled": True,
    "sparse_attention_threshold": 1024,
    "sparse_attention_last_q": 64,
}


def config(patterns, consumer, **model):
    document = make_document(patterns=patterns, consumer=consumer)
    document["model"] |= model
    return PatternConfig.model_validate(document)


def table(config, consumer, **keywords):
    return {check.name: check for check in check_consumer(config, consumer, **keywords)}


def differing(checks):
    return sorted(name for name, check in checks.items() if check.status == "differs")


def folder_with(tmp_path, settings=None, pattern_file=None):
    document = {} if settings is None else {"dual_chunk_attention_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(document))
    if pattern_file is not None:
        (tmp_path / SPARSE_FILE_NAME).write_text(pattern_file)
    return tmp_path


def test_minference_takes_its_own_patterns():
    checks = table(config(MINFERENCE_PATTERNS, "minference"), "minference")
    assert differing(checks) == []


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_a_ready_model_folder_passes(consumer, tmp_path):
    good = config(VERTICAL_SLASH_PATTERNS, consumer)
    folder = folder_with(tmp_path, DUAL_CHUNK, export_config(good, consumer).text)
    assert differing(table(good, consumer, model_folder=folder)) == []


@pytest.mark.parametrize(
    ("pattern", "consumer"),
    [
        (VerticalSlashSpread(vertical=100, diagonals=4, tile=64), "minference"),
        (BlockSparse(blocks=8, tile=64), "minference"),
        (AShape(sink=64, window=512, tile=128), "minference"),
        (AShape(sink=64, window=512, tile=64), "vllm"),
        (BlockSparse(estimator="pooled", blocks=100, tile=64), "sglang"),
        (VerticalSlashLastQ(vertical=100, slash=500, tile=64, last_q=32), "vllm"),
    ],
)
def test_patterns_it_cannot_run_are_named_with_their_heads(pattern, consumer):
    document = make_document(patterns=(Dense(),), consumer=consumer)
    document["heads"][1][2]["pattern"] = pattern.model_dump()
    check = table(PatternConfig.model_validate(document), consumer)["patterns the engine can run"]
    assert check.status == "differs"
    assert "layer 1 head 2" in check.found.replace("heads 2", "head 2")
    assert ("first long prompt" in check.expected) == (consumer != "minference")


def test_masses_of_other_sets_differ():
    wrong = config(VERTICAL_SLASH_PATTERNS, "patternsearch")
    assert "masses of the sets it reads" in differing(table(wrong, "vllm"))
    same_kernels = config(VERTICAL_SLASH_PATTERNS, "sglang")
    assert "masses of the sets it reads" not in differing(table(same_kernels, "vllm"))


def test_a_vertical_of_30_is_pointed_out():
    bumped = config((VerticalSlashLastQ(vertical=30, slash=500, tile=64),), "vllm")
    check = table(bumped, "vllm")["vertical budgets of 30"]
    assert "runs 30 as 130" in check.expected
    assert "8 heads" in check.found


@pytest.mark.parametrize(
    ("head_dim", "patterns", "status"),
    [
        (128, MINFERENCE_PATTERNS, "ok"),
        (96, MINFERENCE_PATTERNS[2:3], "differs"),
        (96, VERTICAL_SLASH_PATTERNS, "cannot tell"),
        (256, VERTICAL_SLASH_PATTERNS, "differs"),
    ],
)
def test_head_dims_of_the_kernels(head_dim, patterns, status):
    checks = table(config(patterns, "minference", head_dim=head_dim), "minference")
    assert checks["head_dim of its kernels"].status == status


def test_sliding_layers_differ():
    document = make_document(layer_types=["full", "sliding"], patterns=VERTICAL_SLASH_PATTERNS)
    document["model"]["sliding_window"] = 64
    checks = table(PatternConfig.model_validate(document), "vllm")
    check = checks["an entry for every head of every layer"]
    assert check.status == "differs"
    assert "layers 1 are not full" in check.found


def test_ranks_must_divide_the_heads():
    assert "heads of a rank" in differing(table(make_config(), "minference", tp_size=3))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sparse_attention_enabled": False}, "runs dense"),
        ({"sparse_attention_last_q": 32}, "scored with 64"),
        ({"sparse_attention_threshold": 32768}, "only beyond 32768"),
        ({"chunk_size": 2048, "local_size": 1024}, "beyond 1024 tokens a chunk"),
    ],
)
def test_settings_that_change_what_runs_are_named(tmp_path, change, word):
    good = config(VERTICAL_SLASH_PATTERNS, "vllm")
    folder = folder_with(tmp_path, DUAL_CHUNK | change, export_config(good, "vllm").text)
    checks = table(good, "vllm", model_folder=folder)
    assert differing(checks) == ["dual_chunk_attention_config in config.json"]
    assert word in checks["dual_chunk_attention_config in config.json"].advice


def test_without_the_settings_the_file_is_never_read(tmp_path):
    good = config(VERTICAL_SLASH_PATTERNS, "sglang")
    checks = table(good, "sglang", model_folder=folder_with(tmp_path))
    assert differing(checks) == [
        "dual_chunk_attention_config in config.json",
        "sparse_attention_config.json in the model's folder",
    ]


@pytest.mark.parametrize(
    ("content", "word"),
    [('{"config_groups": {}}', "another tool's file"), ("[{]", "another tool's file")],
)
def test_a_foreign_pattern_file_is_named(tmp_path, content, word):
    good = config(VERTICAL_SLASH_PATTERNS, "vllm")
    checks = table(good, "vllm", model_folder=folder_with(tmp_path, DUAL_CHUNK, content))
    assert word in checks["sparse_attention_config.json in the model's folder"].found


def test_the_export_of_another_config_is_named(tmp_path):
    good = config(VERTICAL_SLASH_PATTERNS, "vllm")
    other = export_config(config(VERTICAL_SLASH_PATTERNS[:1], "vllm"), "vllm").text
    checks = table(good, "vllm", model_folder=folder_with(tmp_path, DUAL_CHUNK, other))
    assert "another config" in checks["sparse_attention_config.json in the model's folder"].found
